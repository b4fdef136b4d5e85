"""What a mask of Transformers' models says to our attention: sliced, under torch's inference mode,
written to, as a block mask; and how often it is asked."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from attention_formula import attention
from kernelseam.interop import transformers as interop

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers", exc_type=ImportError
)

from kernelseam.interop.transformers_attention import attention_forward  # noqa: E402
from kernelseam.interop.transformers_pattern import Pattern, encoded  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers_models import compared, inputs, made, padded  # noqa: E402
from transformers_small import inputs as small_inputs  # noqa: E402
from transformers_small import result  # noqa: E402

interop.register()


def qkv() -> tuple[Any, Any, Any]:
    """Of two entries and half the KV heads."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 2, 6, 8).unbind()
    return torch.randn(2, 4, 6, 8), k, v


def close(found: Any, q: Any, k: Any, v: Any, mask: Any) -> None:
    """To eager attention, in float64."""
    expected = attention(q, k, v, mask=mask)[0].transpose(1, 2).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize("left", [None, 0, 1])
@pytest.mark.parametrize("kind", ["plain", "padding", "fixed", "packed"])
@pytest.mark.parametrize("kept", [1, 3])
def test_a_model_goes_on_with_its_last_queries(kept: int, kind: str, left: int | None) -> None:
    """Their mask is sliced where one of four axes has them: the pattern stays (Gemma 4)."""
    q, k, v = qkv()
    rows = torch.tensor(
        {
            "plain": [[1] * 6] * 2,
            "padding": [[1] * 6, [0] * 2 + [1] * 4],
            "fixed": [[1] * 6, [0] * 2 + [1] * 4],
            "packed": [[1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4]],
        }[kind]
    )
    seen = CAUSAL & (rows.bool()[:, None, None])
    if left is not None:
        seen = seen & ~CAUSAL.tril(-left - 1)
    if kind == "packed":
        seen = seen & (rows[:, None, :, None] == rows[:, None, None])
    dtype = {"padding": torch.bool, "fixed": torch.int8, "packed": torch.int32}.get(kind)
    elements = None if dtype is None else rows.to(dtype)
    mask = encoded(Pattern(elements, True, left), 2, 6, "cpu")[:, :, -kept:, :]
    found = attention_forward(SimpleNamespace(), q[:, :, -kept:], k, v, mask)[0]
    close(found, q[:, :, -kept:], k, v, seen[:, :, -kept:])


def test_layers_that_share_keys_run_for_the_last_queries_alone() -> None:
    """Gemma 4's, of a prompt that is longer than the window."""
    if not hasattr(hf, "Gemma4ForCausalLM"):
        pytest.skip("this Transformers has no Gemma4ForCausalLM")
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "sliding_window": 5}
    sizes |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size_per_layer_input": 97}
    sizes |= {"head_dim": 16, "global_head_dim": 16}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = hf.Gemma4TextConfig(**sizes, layer_types=kinds)
    torch.manual_seed(7)
    model = hf.Gemma4ForCausalLM(config).eval()
    given = {**small_inputs(model, "left"), "logits_to_keep": 1}
    model.set_attn_implementation("eager")
    expected = result(model, given)
    model.set_attn_implementation("kernelseam")
    assert (result(model, given) - expected).abs().max() / expected.abs().max() < 4e-6


def packed() -> dict[str, Any]:
    places = torch.cat([torch.arange(n) for n in (7, 1, 9, 7)])[None]
    ids = padded("none")["input_ids"][:2].reshape(1, -1)
    return {"input_ids": ids, "position_ids": places, "use_cache": False}


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
@pytest.mark.parametrize("side", ["none", "left", "right", "packed"])
def test_inference_mode(name: str, side: str) -> None:
    if side == "packed" and name == "bert":
        pytest.skip("an encoder's rows are not packed by position_ids")
    given = packed() if side == "packed" else inputs(name, side)
    rows = compared(name, given)
    with torch.inference_mode():
        found, expected = (
            made(name, implementation)(
                **{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            ).logits[rows]
            for implementation in ("kernelseam", "eager")
        )
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 4e-6


class Waits(TorchDispatchMode):
    """Counts what a device would make the host wait for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        listed = torch.Tensor.tolist

        def tolist(x: Any) -> Any:
            self.found.append("tolist")
            return listed(x)

        patch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            self.found.append("places" if func.name() == "aten::nonzero" else "number")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_layers_of_a_model_ask_a_mask_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is padding, and which rows it has: two waits in six layers."""
    config = made("llama", "eager").config
    config.num_hidden_layers = 6
    config.layer_types = None
    model = hf.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("kernelseam")
    with mode():
        given = {n: x.clone() for n, x in padded("left").items()}
        with Waits(monkeypatch) as waits:
            model(**given, use_cache=False)
    # an older Transformers says by a tensor at which position queries begin
    begins = "cache_position" in str(inspect.signature(hf.masking_utils.sdpa_mask))
    assert waits.found in (["number", "tolist"], ["number"] * (1 + begins) + ["tolist"])


def test_a_mask_that_is_written_to_is_asked_again() -> None:
    q, k, v = qkv()
    keys = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mask = keys.clone()
            for lost in (2, 3):
                mask[1, -lost:] = 0
                module = SimpleNamespace(is_causal=True)
                found = attention_forward(module, q, k, v, mask)[0]
                padded_queries = ~mask.bool()[:, None, :, None]
                seen = CAUSAL & mask.bool()[:, None, None] & ~padded_queries
                close(found, q, k, v, seen)


@pytest.mark.slow("torch compiles what makes the mask")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 9])
def test_block_masks_of_flex(window: int | None) -> None:
    """As Transformers makes them: of its mask functions, padding and all."""
    from transformers import masking_utils as of_transformers

    made_of = of_transformers.causal_mask_function
    if window is not None:
        made_of = of_transformers.sliding_window_causal_mask_function(window)
    padding = torch.ones(2, 50, dtype=torch.bool)
    padding[1, :7] = False
    given = {"mask_function": made_of, "attention_mask": padding}
    blocks = of_transformers.flex_attention_mask(2, 50, 50, **given)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))
    i = torch.arange(50)
    seen = (i[:, None] >= i) & (i[:, None] - i < (window or 50))
    whole = (seen & padding[:, None, :])[:, None]
    module = SimpleNamespace(is_causal=True)
    got, _ = attention_forward(module, query, key, value, blocks)
    want, _ = attention_forward(module, query, key, value, whole)
    torch.testing.assert_close(got, want)
