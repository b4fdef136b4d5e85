"""Transformers' own models by our attention, beside its eager attention, on the NumPy backend in
float32. Models are made on the spot, from small configs and random weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kernelseam.errors import InvalidValue
from kernelseam.interop import transformers as interop

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers", exc_type=ImportError
)

from kernelseam.interop import transformers_attention as ours  # noqa: E402
from kernelseam.interop import transformers_padding as of_rows  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers_models import MODELS, compared, inputs, made, padded  # noqa: E402

interop.register()

DECODERS = [m.name for m in MODELS.values() if m.decoder]
LOGITS = 4e-6
"""Bound of a logit's error, relative to the largest logit: float32 through two layers."""
GRADIENTS = 2e-5
"""Bound of a gradient's error, relative to the largest element of all gradients."""


@pytest.fixture(autouse=True)
def _apart() -> Any:
    """Each test with nothing compiled before it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(found: Any, wanted: Any, bound: float = LOGITS) -> None:
    error = (found - wanted).abs().max().item()
    assert error <= bound * wanted.abs().max().item(), f"{error} of {wanted.abs().max().item()}"


def logits(name: str, implementation: str, given: dict[str, Any], **compiled: Any) -> Any:
    model = made(name, implementation)
    called = torch.compile(model, fullgraph=True, **compiled) if compiled else model
    with torch.no_grad():
        return called(**given).logits[compared(name, given)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], Any]]:
    """(function, options, q) of each attention by ours."""
    found: list[tuple[str, dict[str, Any], Any]] = []

    def counted(home: Any, name: str) -> None:
        function = getattr(home, name)

        def call(q: Any, *rest: Any, **options: Any) -> Any:
            found.append((name, options, q))
            return function(q, *rest, **options)

        monkeypatch.setattr(home, name, call)

    counted(ours, "attention")
    counted(of_rows, "attention_varlen")
    return found


# --- models


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, side: str, calls: list[Any]) -> None:
    given = inputs(name, side)
    close(logits(name, "kernelseam", given), logits(name, "eager", given))
    assert len(calls) == (6 if name == "t5" else 2)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "side",
    [
        "left",
        pytest.param("none", marks=pytest.mark.slow("half a minute of the same on other rows")),
    ],
)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(name: str, side: str, cache: str) -> None:
    """Greedy tokens are equal, and logits are close; beyond the window of 5 where there is one."""
    kinds = {} if cache == "dynamic" else {"cache_implementation": "static"}
    eager, found = (
        made(name, implementation).generate(
            **padded(side),
            **kinds,
            max_new_tokens=8,
            do_sample=False,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for implementation in ("eager", "kernelseam")
    )
    assert torch.equal(found.sequences, eager.sequences)
    close(torch.stack(found.logits), torch.stack(eager.logits))


def gradients(name: str, implementation: str, side: str, **compiled: Any) -> dict[str, Any]:
    """A training step's; rows of padding, and the first after them, which padding would have to
    predict, take no part in the loss."""
    given = inputs(name, side)
    model = made(name, implementation).train()
    called = torch.compile(model, fullgraph=True, **compiled) if compiled else model
    rows = compared(name, given)
    scored = called(**given).logits
    wanted = torch.arange(rows.numel()).view(rows.shape) % 97
    torch.nn.functional.cross_entropy(scored[rows], wanted[rows]).backward()
    return {n: x.grad for n, x in model.named_parameters() if x.grad is not None}


def compare_gradients(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(x.abs().max().item() for x in wanted.values())
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max().item()
        assert error <= GRADIENTS * largest, f"{name}: {error} of {largest}"


@pytest.mark.parametrize(
    "side",
    [
        "left",
        "right",
        pytest.param("none", marks=pytest.mark.slow("half a minute of the same on other rows")),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, side: str) -> None:
    compare_gradients(gradients(name, "kernelseam", side), gradients(name, "eager", side))


def test_gradients_reach_sinks_and_position_bias() -> None:
    assert any("sinks" in n for n in gradients("gpt_oss", "kernelseam", "none"))
    assert any("relative_attention_bias" in n for n in gradients("t5", "kernelseam", "none"))


def test_compiled_without_breaks() -> None:
    given = inputs("llama", "left")
    close(
        logits("llama", "kernelseam", given, backend="aot_eager"), logits("llama", "eager", given)
    )


@pytest.mark.slow("compiles a model: 5 to 70 s each")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name: str, side: str) -> None:
    given = inputs(name, side)
    close(logits(name, "kernelseam", given, backend="aot_eager"), logits(name, "eager", given))


@pytest.mark.slow("compiles a model: 5 to 70 s each")
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled_by_inductor(name: str) -> None:
    given = inputs(name, "left")
    close(logits(name, "kernelseam", given, backend="inductor"), logits(name, "eager", given))


@pytest.mark.slow("compiles a model: 5 to 70 s each")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_compiled_training_step(name: str) -> None:
    found = gradients(name, "kernelseam", "right", backend="aot_eager")
    compare_gradients(found, gradients(name, "eager", "right"))


@pytest.mark.slow("compiles a model: 5 to 70 s each")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_compiled_generation_with_a_static_cache(name: str) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    options["cache_implementation"] = "static"
    wanted = made(name, "eager").generate(**padded("left"), **options)
    model = made(name, "kernelseam")
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(**padded("left"), **options), wanted)


def test_bfloat16() -> None:
    given = inputs("llama", "left")
    with torch.no_grad():
        wanted = made("llama", "eager")(**given).logits
        found = made("llama", "kernelseam").to(torch.bfloat16)(**given).logits
        eager = made("llama", "eager").to(torch.bfloat16)(**given).logits
    rows = compared("llama", given)
    errors = [(x.float() - wanted)[rows].abs().max().item() for x in (found, eager)]
    assert errors[0] <= 1.5 * errors[1], "errors of ours and of eager attention, from float32"


# --- how rows and masks are handed over


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_padding_is_taken_out_of_causal_attentions(name: str, side: str, calls: list[Any]) -> None:
    given = inputs(name, side)
    logits(name, "kernelseam", given)
    tokens = int(given["attention_mask"].sum())
    assert [(n, q.shape[0]) for n, _, q in calls] == [("attention_varlen", tokens)] * 2
    assert not any("mask" in options for _, options, _ in calls)


def test_an_encoder_ends_keys_by_lengths(calls: list[Any]) -> None:
    logits("bert", "kernelseam", inputs("bert", "right"))
    for name, options, _ in calls:
        assert name == "attention" and "mask" not in options
        assert options["kv_lengths"].tolist() == [12, 8, 1]


def test_no_mask_where_nothing_is_hidden(calls: list[Any]) -> None:
    given = padded("none")
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    logits("llama", "kernelseam", given)
    for name, options, _ in calls:
        assert name == "attention"
        assert options == {"causal": True, "layout": "bshd", "scale": 32**-0.5, "softcap": None}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_position_ids(name: str, calls: list[Any]) -> None:
    lengths = (7, 1, 9, 7)
    given = {
        "input_ids": padded("none")["input_ids"][:2].reshape(1, -1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }
    wanted = logits(name, "eager", {**given, "use_cache": False})
    close(logits(name, "kernelseam", {**given, "use_cache": False}), wanted)
    offsets = [n for n, _, _ in calls]
    assert offsets == ["attention_varlen"] * 2
    alone = logits(name, "eager", {"input_ids": given["input_ids"][:, 8:17]})
    close(wanted[8:17], alone)  # packed rows do not see each other


def test_a_mask_of_four_axes_is_taken_as_it_is() -> None:
    """Of bool, and added to the scores."""
    given = padded("none")
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    mask[1, :, :, 2] = mask[1, :, 2, 2:3]
    mask[..., :3, :3] = True  # a prefix
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    wanted = logits("llama", "eager", {**given, "attention_mask": added})
    for x in (mask, added):
        close(logits("llama", "kernelseam", {**given, "attention_mask": x}), wanted)


# --- masks beside Transformers' own


def by_torch(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """[B, S_q, H, D]; rows that see nothing are 0."""
    groups = q.shape[1] // k.shape[1]
    made = torch.nn.functional.scaled_dot_product_attention(
        q.double(),
        k.repeat_interleave(groups, 1).double(),
        v.repeat_interleave(groups, 1).double(),
        attn_mask=mask,
    )
    seen = mask.expand(q.shape[0], -1, q.shape[2], -1).any(-1, keepdim=True)
    return made.where(seen, 0).transpose(1, 2).float()


def _patterns() -> dict[str, tuple[Any, bool, dict[str, Any]]]:
    """(mask function, whether it is causal, what the mask is asked with besides)."""
    m = importlib.import_module("transformers.masking_utils")
    both = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    chunked = m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    prefix = m.or_masks(m.causal_mask_function, lambda b, h, q, k: k < 3)
    window = m.sliding_window_causal_mask_function(3)
    chunks = {"local_size": 3, "config": SimpleNamespace(attention_chunk_size=3)}
    patterns = {
        "causal": (m.causal_mask_function, True, {}),
        "causal, compiled": (m.causal_mask_function, True, {"allow_is_causal_skip": False}),
        "window": (window, True, {"local_size": 3}),
        "chunks": (chunked, True, chunks),
        "prefix": (prefix, True, {"allow_is_causal_skip": False, "use_vmap": True}),
    }
    if hasattr(m, "bidirectional_mask_function"):
        patterns["all"] = (m.bidirectional_mask_function, False, both)
        patterns["all, of a size"] = (*patterns["all"][:2], {**both, "local_size": 3})
    if hasattr(m, "sliding_window_bidirectional_mask_function"):
        around = m.sliding_window_bidirectional_mask_function(3)
        patterns["window on both sides"] = (around, False, {**both, "local_size": 3})
    return patterns


BY_POSITION = "cache_position" in str(inspect.signature(masking_utils.sdpa_mask))
"""Whether this Transformers says at which positions queries are, each by each."""
PADDING = {
    "none": None,
    "left": [[1] * 9, [0] * 4 + [1] * 5],
    "right": [[1] * 9, [1] * 7 + [0] * 2],
    "between": [[1] * 9, [1, 0, 0, 1, 1, 0, 1, 1, 1]],
    "an entry": [[1] * 9, [0] * 9],
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("place", ["whole", "chunk", "last", "cut", "fixed", "fixed, last"])
@pytest.mark.parametrize("pattern", _patterns())
def test_masks_say_what_those_of_sdpa_say(pattern: str, place: str, padding: str) -> None:
    """Queries and keys at offsets as caches have them: growing, cut to a window, of fixed length
    with keys that are not there yet, which hold NaN."""
    masking = importlib.import_module("kernelseam.interop.transformers_mask")
    function, causal, options = _patterns()[pattern]
    if not causal and place != "whole":
        pytest.skip("an encoder has no cache")
    queries, offset, keys, cut = {
        "whole": (9, 0, 9, 0),
        "chunk": (4, 5, 9, 0),
        "last": (1, 8, 9, 0),
        "cut": (2, 7, 6, 3),
        "fixed": (4, torch.tensor(5), 13, 0),
        "fixed, last": (1, torch.tensor(8), 13, 0),
    }[place]
    mask = None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool()
    where = {"q_length": queries, "q_offset": offset}
    if BY_POSITION:
        where = {"cache_position": torch.arange(queries) + offset}
    asked = {
        "batch_size": 2,
        "kv_length": keys,
        **where,
        "kv_offset": cut,
        "mask_function": function,
        "attention_mask": mask,
    }
    found = masking.attention_mask(**asked, **options)
    sdpa = importlib.import_module("transformers.masking_utils").sdpa_mask
    vmap = options.get("use_vmap", False)
    whole = sdpa(**asked, allow_is_causal_skip=False, use_vmap=vmap)
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 8)
    k, v = torch.randn(2, 2, 2, keys, 8).unbind()
    layer = SimpleNamespace(is_causal=False)  # the mask says whether
    result, none = ours.attention_forward(layer, q, k, v, found)
    assert none is None
    wanted = by_torch(q, k, v, whole)
    if causal and mask is not None and found.dtype is torch.bool:
        wanted[~mask[:, 9 - queries :]] = result[~mask[:, 9 - queries :]] = 0
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=2e-6)
    pure = pattern not in ("chunks", "prefix", "causal, compiled")
    few = found is None or found.dim() == 5 or found.shape[1:3] == (1, 1)
    assert few == pure or queries == 1
    assert found is None or not pure or found.untyped_storage().nbytes() <= 4 * 2 * keys
    sees_all = pattern.startswith("all") or (pattern == "causal" and place == "last")
    assert (found is None) == bool(sees_all and (mask is None or mask.all()))


def test_a_mask_that_was_made_before_is_kept() -> None:
    masking = importlib.import_module("kernelseam.interop.transformers_mask")
    asked = {"batch_size": 2, "q_length": 5, "kv_length": 5}
    for mask in (masking.attention_mask(**asked), torch.ones(2, 1, 5, 5, dtype=torch.bool)):
        assert masking.attention_mask(**asked, attention_mask=mask) is mask


# --- refusals


def test_dropout_is_refused() -> None:
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            attention_dropout=0.5,
        )
    )
    model.set_attn_implementation("kernelseam")
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(InvalidValue, match=r"dropout = 0\.5: must be 0\..*attention_dropout"):
        model.train()(ids)
    assert model.eval()(ids).logits.shape == (1, 3, 9)


@pytest.mark.skipif(hf.__version__[0] == "4", reason="this Transformers warns, and does not ask us")
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_probabilities_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=r"output_attentions = True.*\"eager\""):
        made(name, "kernelseam")(**inputs(name, "none"), output_attentions=True)


@pytest.mark.skipif(BY_POSITION, reason="this Transformers does not ask us for these models' masks")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_a_model_with_an_attention_of_its_own_is_refused(name: str, compiled: bool) -> None:
    """Transformers does not refuse it when the model is made. ALiBi's models are among them."""
    sizes = {
        "Bloom": {"hidden_size": 32, "n_head": 2, "n_layer": 1},
        "Mpt": {"d_model": 32, "n_heads": 2, "n_layers": 1},
    }
    config = getattr(hf, f"{name}Config")(vocab_size=9, **sizes[name])
    model = getattr(hf, f"{name}ForCausalLM")._from_config(config, attn_implementation="kernelseam")
    call = torch.compile(model, backend="eager") if compiled else model
    refused = pytest.raises(Exception, match=rf"{name}Config's model has an attention of its own")
    with refused, torch.no_grad():
        call(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.skipif(
    not hasattr(hf.GenerationMixin, "generate_batch")
    or tuple(map(int, hf.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers has other names for continuous batching",
)
def test_transformers_has_no_hook_for_continuous_batching() -> None:
    """It knows names of its own, and names with "flash" in them, which it looks up elsewhere though
    they are registered. When this test fails, Transformers has a hook for it."""
    with pytest.raises(ValueError, match="kernelseam is not supported for continuous batching"):
        made("llama", "kernelseam").generate_batch(
            [[3, 4, 5]], generation_config=hf.GenerationConfig(max_new_tokens=2, eos_token_id=-1)
        )
    modeling = importlib.import_module("transformers.modeling_utils")
    modeling.AttentionInterface.register("kernelseam_flash", ours.attention_forward)
    try:
        with pytest.raises(ValueError, match="Could not find the currently requested flash"):
            made("llama", "kernelseam_flash")
    finally:
        del modeling.ALL_ATTENTION_FUNCTIONS._global_mapping["kernelseam_flash"]


# --- registration


def test_registered_once_or_twice() -> None:
    assert interop.register() == interop.register() == ("kernelseam",)
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    assert modeling.ALL_ATTENTION_FUNCTIONS["kernelseam"] is ours.attention_forward
    mask = masking.ALL_MASK_ATTENTION_FUNCTIONS["kernelseam"]
    assert mask.__module__ == "kernelseam.interop.transformers_mask"


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        InvalidValue, match=r"transformers = None: is not installed\. pip install 'transformers>="
    ):
        interop.register()


@pytest.mark.parametrize("version", ["4.56.2", "strange"])
def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    old = ModuleType("transformers")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(InvalidValue, match=rf"{version}.*: must be 4\.57 or later.*pip install"):
        interop.register()
