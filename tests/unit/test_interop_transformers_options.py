"""What Transformers' models hand to our attention beside q, k and v: taken as eager attention takes
it, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attention_formula import attention
from kernelseam.errors import InvalidValue
from kernelseam.interop import transformers as interop

torch = pytest.importorskip("torch", reason="torch is not installed")
hf = pytest.importorskip(
    "transformers", reason="transformers is missing: pip install transformers", exc_type=ImportError
)

from kernelseam.interop.transformers_attention import attention_forward  # noqa: E402
from kernelseam.interop.transformers_pattern import Pattern, encoded  # noqa: E402
from transformers_models import padded  # noqa: E402
from transformers_small import inputs as small_inputs  # noqa: E402
from transformers_small import made as small_model  # noqa: E402
from transformers_small import result  # noqa: E402

interop.register()


def qkv(rows: int = 6, keys: int = 6, heads: int = 4) -> tuple[Any, Any, Any]:
    """Of two entries and half the KV heads."""
    torch.manual_seed(0)
    q = torch.randn(2, heads, rows, 8)
    k, v = torch.randn(2, 2, heads // 2, keys, 8).unbind()
    return q, k, v


def layer(**attributes: Any) -> Any:
    return SimpleNamespace(**{"is_causal": False} | attributes)


def wanted(q: Any, k: Any, v: Any, mask: Any, bias: Any = 0.0, sinks: Any = None) -> Any:
    """Eager attention, in float64: [B, S_q, H, D]."""
    out, _ = attention(q, k, v, mask=mask, bias=bias, sinks=sinks)
    return out.transpose(1, 2).float()


def causal(rows: int, keys: int) -> Any:
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


# --- options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_mask", torch.ones(4)),
        ("relative_position", torch.zeros(6, 6)),
        ("logit_cap", 30.0),
        ("use_top_left_mask", True),
        ("bias_mask", []),
    ],
)
def test_an_option_that_is_not_taken_is_refused_by_name(name: str, value: Any) -> None:
    match = rf"^{name} = .*would be dropped.*attn_implementation=\"eager\""
    with pytest.raises(InvalidValue, match=match):
        attention_forward(layer(), *qkv(), None, **{name: value})


def test_a_models_own_keywords_go_by() -> None:
    ids, plain = torch.arange(6)[None], attention_forward(layer(), *qkv(), None)[0]
    options = {"position_ids": ids, "use_cache": True, "head_mask": None, "anything": False}
    assert torch.equal(attention_forward(layer(), *qkv(), None, **options)[0], plain)


@pytest.mark.parametrize("dense", [False, True])
def test_selected_keys(dense: bool) -> None:
    """−1 is none; a key that is hidden by the mask stays hidden."""
    q, k, v = qkv(4, 7)
    indices = torch.rand(2, 4, 7).argsort(-1)[..., :3].to(torch.int32)
    indices[0, 0], indices[..., 0] = torch.tensor([5, -1, -1]), 0
    seen = torch.zeros(2, 4, 8, dtype=torch.bool)
    seen.scatter_(-1, torch.where(indices < 0, 7, indices).long(), True)
    seen = seen[:, None, :, :7] & causal(4, 7)
    mask = causal(4, 7).expand(2, 1, -1, -1) if dense else pattern(Pattern(None, True), 7)
    close(attention_forward(layer(), q, k, v, mask, indices=indices)[0], wanted(q, k, v, seen))


def pattern(made: Pattern, keys: int) -> Any:
    return encoded(made, 2, keys, "cpu")


def test_selected_blocks() -> None:
    q, k, v = qkv(4, 7)
    blocks = torch.tensor([[0, 1], [0, 2], [3, 0], [0, -1]]).expand(2, 2, 4, 2).clone()
    blocks[:, 1, :, 1] = -1
    blocks[:, 1, :, 0] = 0
    seen = torch.zeros(2, 2, 4, 9, dtype=torch.bool)
    for b in range(2):
        for h in range(2):
            for i in range(4):
                for n in blocks[b, h, i][blocks[b, h, i] >= 0].tolist():
                    seen[b, h, i, 2 * n : 2 * n + 2] = True
    seen = seen[..., :7].repeat_interleave(2, 1) & causal(4, 7)
    sparse = layer(indexer=SimpleNamespace(block_size=2))
    mask = pattern(Pattern(None, True), 7)
    found = attention_forward(sparse, q, k, v, mask, block_indices=blocks)[0]
    close(found, wanted(q, k, v, seen))
    with pytest.raises(InvalidValue, match=r"block_indices = given: .*indexer\.block_size"):
        attention_forward(layer(), q, k, v, mask, block_indices=blocks)


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_by_head_and_by_query(name: str) -> None:
    """With their gradients; and where an entry is padded."""
    q, k, v = qkv()
    keys = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    seen = causal(6, 6) & keys[:, None, None]
    mask = pattern(Pattern(keys, True), 6)
    for sinks in (torch.randn(4), torch.randn(2, 4, 6, 1)):
        sinks.requires_grad_()
        whole = sinks if sinks.dim() == 4 else sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)
        found = attention_forward(layer(), q, k, v, mask, **{name: sinks})[0]
        expected = wanted(q, k, v, seen, sinks=whole)
        rows = keys[:, :, None, None]
        close(found * rows, expected * rows)
        dout = torch.randn_like(found) * rows
        close(*(torch.autograd.grad(x, sinks, dout)[0] for x in (found, expected)))
    with pytest.raises(InvalidValue, match=rf"{name} = .*\[2, 6\].*must be \[H=4\] or \[B=2"):
        attention_forward(layer(), q, k, v, None, **{name: torch.zeros(2, 6)})
    with pytest.raises(InvalidValue, match=r"s_aux = given: sinks are given as well"):
        attention_forward(layer(), q, k, v, None, s_aux=sinks, sinks=sinks)


def test_packed_rows_with_a_bias_a_selection_or_sinks_by_query() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
    q, k, v = qkv()
    seen = (numbers[:, :, None] == numbers[:, None])[:, None] & causal(6, 6)
    mask = pattern(Pattern(numbers.to(torch.int32), True), 6)
    bias, sinks = torch.randn(1, 4, 6, 6), torch.randn(2, 4, 6, 1)
    found = attention_forward(layer(), q, k, v, mask, position_bias=bias, sinks=sinks)[0]
    close(found, wanted(q, k, v, seen, bias=bias, sinks=sinks))
    first = torch.zeros(2, 6, 1, dtype=torch.int32)
    found = attention_forward(layer(), q, k, v, mask, indices=first)[0]
    seen &= torch.arange(6) == 0
    close(found, wanted(q, k, v, seen).nan_to_num())


def test_packed_rows_under_a_compiler_that_has_their_mask_given() -> None:
    """As where a model's layers are compiled one by one."""
    mask = pattern(Pattern(torch.tensor([[0, 0, 1, 1, 1, 2]] * 2, dtype=torch.int32), True), 6)
    plain = attention_forward(layer(), *qkv(), mask)[0]
    torch._dynamo.reset()
    module = layer()

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return attention_forward(module, q, k, v, mask)[0]

    close(torch.compile(call, fullgraph=True, backend="aot_eager")(*qkv(), mask), plain)
    torch._dynamo.reset()


def test_packed_rows_by_their_offsets() -> None:
    q, k, v = qkv()
    told = torch.tensor([0, 4, 6, 12])
    packed = {"cu_seq_lens_q": told, "cu_seq_lens_k": told, "max_length_q": 6, "max_length_k": 6}
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1], [2] * 6])
    seen = (numbers[:, :, None] == numbers[:, None])[:, None] & causal(6, 6)
    masks = [None, pattern(Pattern(None, True), 6), pattern(Pattern(numbers.int(), True), 6)]
    for mask in masks:
        found = attention_forward(layer(is_causal=True), q, k, v, mask, **packed)[0]
        close(found, wanted(q, k, v, seen))


def test_offsets_go_together_and_exclude_what_one_list_of_rows_has_not() -> None:
    told = torch.tensor([0, 6, 12])
    whole = {"cu_seq_lens_q": told, "cu_seq_lens_k": told, "max_length_q": 6, "max_length_k": 6}
    for name in whole:
        part = {n: x for n, x in whole.items() if n != name}
        with pytest.raises(InvalidValue, match=rf"{name} = None: .* go together"):
            attention_forward(layer(), *qkv(), None, **part)
    keys = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    bias = {"position_bias": torch.zeros(1, 4, 6, 6)}
    for mask, more in ((pattern(Pattern(keys, True), 6), {}), (None, bias)):
        with pytest.raises(
            InvalidValue, match=r"cu_seq_lens_q = given: packed rows have no padding"
        ):
            attention_forward(layer(), *qkv(), mask, **whole, **more)


# --- masks


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (causal(6, 6).long()[None, None], r"dtype = torch\.int64: must be bool, or floats"),
        (torch.ones(2, 6), r"dtype = torch\.float32: must be bool or an integer"),
        (causal(6, 6)[None], r"shape \[1, 6, 6\]: must have 2 or 4 axes"),
    ],
)
def test_a_mask_whose_numbers_may_be_misread_is_refused(mask: Any, match: str) -> None:
    with pytest.raises(InvalidValue, match=rf"attention_mask.*{match}"):
        attention_forward(layer(), *qkv(), mask)


BOTH_SIDES = SimpleNamespace(is_causal=False)


@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.parametrize(
    "module",
    [{}, {"is_causal": True}, {"is_causal": False}, {"is_causal": True, "config": BOTH_SIDES}],
)
@pytest.mark.parametrize("given", [None, "padding", "causal", "both sides"])
def test_causality_is_the_masks_or_the_modules(given: str | None, module: Any, told: Any) -> None:
    """It is never assumed: an attention that does not say so is not causal, and where there is no
    mask its module is not asked. What a pattern says is not taken back by ``is_causal`` (Moonshine
    passes False where there is a mask), and a window is the pattern's; ``sliding_window`` makes
    none."""
    q, k, v = qkv()
    keys = torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()
    masks = {
        None: None,
        "padding": keys.long(),
        "causal": pattern(Pattern(None, True), 6),
        "both sides": pattern(Pattern(None, False, 1), 6),
    }
    hides = given == "causal"
    if given in (None, "padding"):
        own = given == "padding" and module.get("is_causal", False) and "config" not in module
        hides = own if told is None else told
    seen = causal(6, 6) if hides else torch.ones(6, 6, dtype=torch.bool)
    if given == "both sides":
        seen = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    rows = torch.ones(2, 6, 1, 1)
    if given == "padding":
        seen, rows = seen & keys[:, None, None], keys[:, :, None, None]
    options = {"is_causal": told, "sliding_window": 2}
    found = attention_forward(SimpleNamespace(**module), q, k, v, masks[given], **options)[0]
    close(found * rows, wanted(q, k, v, seen.expand(2, 1, 6, 6)) * rows)


@pytest.mark.parametrize("name", ["BridgeTower", "Phi4MultimodalVision"])
def test_modules_that_say_causal_of_what_sees_both_sides(name: str) -> None:
    """Layers of tokens and images, and of patches, whose own attention does not read it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    config: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 64, **sizes}
    given = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(7))}
    parts = ["last_hidden_state"]
    if name == "BridgeTower":
        config |= {"text_config": config | {"vocab_size": 97}}
        config |= {"vision_config": sizes | {"image_size": 32}}
        given["input_ids"] = torch.arange(3, 9)[None]
        parts = ["text_features", "image_features"]
    else:
        config |= {"image_size": 32, "patch_size": 8}
    model_class = getattr(hf, f"{name}Model")
    torch.manual_seed(7)
    model = model_class(model_class.config_class(**config)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**given)
        model.set_attn_implementation("kernelseam")
        found = model(**given)
    for part in parts:
        error = (found[part] - expected[part]).abs().max() / expected[part].abs().max()
        assert error < 4e-6, part


def test_rows_that_are_not_contiguous_are_copied() -> None:
    """By every order of axes; with gradients."""
    plain = [x.requires_grad_() for x in qkv()]
    other = [x.detach().mT.contiguous().mT.requires_grad_() for x in plain]
    assert all(x.stride(-1) != 1 for x in other)
    found, expected = (attention_forward(layer(), *x, None)[0] for x in (other, plain))
    close(found, expected)
    dout = torch.randn(found.shape)
    for one, two in zip(
        torch.autograd.grad(found, other, dout),
        torch.autograd.grad(expected, plain, dout),
        strict=True,
    ):
        close(one, two)


# --- models


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BigBirdPegasusForCausalLM", "bigbird_pegasus"),
        ("DPRQuestionEncoder", "dpr"),
        ("DeepseekV32ForCausalLM", "deepseek_v32"),
        ("GitForCausalLM", "git"),
        ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
        ("Inkling2ForCausalLM", "inkling2"),
        ("InklingForCausalLM", "inkling"),
        ("LasrForCTC", "lasr_ctc"),
        ("MoonshineForConditionalGeneration", "moonshine"),
        ("MiniMaxM3VLForCausalLM", "minimax_m3_vl_text"),
        ("NllbMoeForConditionalGeneration", "nllb-moe"),
        ("PegasusXForConditionalGeneration", "pegasus_x"),
    ],
)
@pytest.mark.parametrize("side", ["none", "left"])
def test_models_that_do_more_with_masks_than_hand_them_over(
    name: str, kind: str, side: str
) -> None:
    """Selections, sinks by query, attention of their own beside ours, modules that do not say that
    they are causal, rows in columns."""
    if not hasattr(hf, name):
        pytest.skip(f"this Transformers has no {name}")
    model = small_model(name, kind)
    given = small_inputs(model, side)
    expected = result(model, given)
    model.set_attn_implementation("kernelseam")
    error = (result(model, given) - expected).abs().max() / expected.abs().max()
    assert error < 4e-6


@pytest.mark.parametrize("tokens", [5, 6, 7, 12])
def test_an_encoder_with_a_window_on_both_sides(tokens: int) -> None:
    """From as many tokens as all see each other: T5Gemma's of 5 before and after."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    parts = {n: sizes | {"sliding_window": 5} for n in ("encoder", "decoder")}
    torch.manual_seed(7)
    model = hf.T5GemmaForConditionalGeneration(hf.T5GemmaConfig(**parts, vocab_size=97)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 3 + tokens)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    expected = result(model, given)
    model.set_attn_implementation("kernelseam")
    error = (result(model, given) - expected).abs().max() / expected.abs().max()
    assert error < 4e-6


def test_packed_rows_of_a_model_that_reads_its_mask() -> None:
    """Its indexer takes two of the four axes, which it gets."""
    if not hasattr(hf, "DeepseekV32ForCausalLM"):
        pytest.skip("this Transformers has no DeepseekV32ForCausalLM")
    model = small_model("DeepseekV32ForCausalLM", "deepseek_v32")
    places = torch.cat([torch.arange(n) for n in (7, 1, 9, 7)])[None]
    ids = padded("none")["input_ids"][:2].reshape(1, -1)
    given = {"input_ids": ids, "position_ids": places, "use_cache": False}
    expected = result(model, given)
    model.set_attn_implementation("kernelseam")
    close(result(model, given), expected)
