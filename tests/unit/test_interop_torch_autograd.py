"""Attention that torch differentiates: gradients held to torch's own, of its SDPA and of the
formula in float64."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from attention_formula import attention
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")
from kernelseam.interop import torch_attention  # noqa: E402

B, H, G, S_Q, S_K, D, D_V = 2, 4, 2, 17, 23, 16, 8


def tensors(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def qkv(dtype: Any = torch.float32) -> list[Any]:
    return tensors((B, H, S_Q, D), (B, G, S_K, D), (B, G, S_K, D_V), dtype=dtype)


def formula(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The attention of [B, H, S, D] tensors in float64, as torch differentiates it."""
    lengths = options.pop("kv_lengths", None)
    if lengths is not None:
        options["mask"] = torch.arange(k.shape[2]) < lengths[:, None, None, None]
    return attention(q, k, v, **options)[0]


def agree(got: Any, want: Any, inputs: dict[str, Any], limit: float) -> None:
    """The same result, and the same gradients for the same random gradient of the result."""
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(9)).to(got.dtype)
    torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit)
    mine = torch.autograd.grad(got, list(inputs.values()), dout)
    theirs = torch.autograd.grad(want, list(inputs.values()), dout.to(want.dtype))
    for name, a, b in zip(inputs, mine, theirs, strict=True):
        assert (a.dtype, a.shape) == (inputs[name].dtype, inputs[name].shape), name
        assert b.abs().max() > 1e-3, name
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < 4 * limit, (name, float(error))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (6, 2)},
    "window-left": {"window": (6, None)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "softcap-causal": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([[0.5, 0.3, 0.1, 0.0]] * B)},
    "mask": {"mask": torch.rand(B, 1, S_Q, S_K, generator=torch.Generator().manual_seed(1)) < 0.7},
    "prefix": {"causal": True, "prefix_lengths": torch.tensor([8, 20], dtype=torch.int32)},
    "lengths": {"kv_lengths": torch.tensor([23, 11], dtype=torch.int32)},
    "bias": {"bias": (B, H, S_Q, S_K)},
    "bias-of-heads": {"bias": (H, S_Q, S_K)},
    "bias-of-keys": {"bias": (B, 1, 1, S_K)},
    "sinks": {"sinks": (H,)},
    "all": {"causal": True, "softcap": 2.0, "bias": (1, H, S_Q, S_K), "sinks": (H,)},
}


def filled(
    options: dict[str, Any], dtype: Any = torch.float32
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options with tensors for shapes, and those that have gradients."""
    made = {
        n: tensors(x, seed=3, dtype=torch.float32 if n == "sinks" else dtype)[0]
        if n in ("bias", "sinks")
        else x
        for n, x in options.items()
    }
    return made, {n: x for n, x in made.items() if n in ("bias", "sinks")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_in_16_bits(dtype: str) -> None:
    q, k, v = qkv(getattr(torch, dtype))
    options, more = filled(OPTIONS["all"], q.dtype)
    limit = 2e-3 if dtype == "float16" else 1.6e-2
    agree(
        ks.attention(q, k, v, **options),
        formula(q, k, v, **options),
        {"q": q, "k": k, "v": v, **more},
        limit,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_in_float64(name: str) -> None:
    """To float64's own accuracy, large scores too: the LSE that is kept between the two ways is as
    wide."""
    q, k, v = qkv(torch.float64)
    with torch.no_grad():
        q *= 8
    options, more = filled(OPTIONS[name], torch.float64)
    sinks = more.pop("sinks", None)
    agree(
        ks.attention(q, k, v, **options),
        formula(q, k, v, **options),
        {"q": q, "k": k, "v": v, **more},
        1e-13,
    )
    if sinks is not None:  # of float32
        agree(ks.attention(q, k, v, **options), formula(q, k, v, **options), {"sinks": sinks}, 1e-7)


def test_torchs_own_attention() -> None:
    """Its scaled_dot_product_attention: causal, by a mask, by a bias, with grouped heads."""
    own = torch.nn.functional.scaled_dot_product_attention
    q, k, v = tensors((B, H, S_Q, D), (B, H, S_Q, D), (B, H, S_Q, D))
    inputs = {"q": q, "k": k, "v": v}
    agree(ks.attention(q, k, v, causal=True), own(q, k, v, is_causal=True), inputs, 1e-5)
    mask = torch.rand(S_Q, S_Q, generator=torch.Generator().manual_seed(2)) < 0.6
    mask.fill_diagonal_(True)
    agree(ks.attention(q, k, v, mask=mask), own(q, k, v, attn_mask=mask), inputs, 1e-5)
    (bias,) = tensors((1, H, S_Q, S_Q), seed=5)
    agree(
        ks.attention(q, k, v, bias=bias),
        own(q, k, v, attn_mask=bias),
        {**inputs, "bias": bias},
        1e-5,
    )
    few, values = tensors((B, G, S_Q, D), (B, G, S_Q, D), seed=6)
    agree(
        ks.attention(q, few, values),
        own(q, few, values, enable_gqa=True),
        {"q": q, "k": few, "v": values},
        1e-5,
    )


def test_token_major() -> None:
    q, k, v = tensors((B, S_Q, H, D), (B, S_K, G, D), (B, S_K, G, D_V))
    got = ks.attention(q, k, v, layout="bshd", causal=True)
    want = formula(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    agree(got, want, {"q": q, "k": k, "v": v}, 1e-5)


def test_packed_sequences() -> None:
    """Rows that belong to no sequence are 0 everywhere, NaN as they are in the inputs."""
    lengths, first = (7, 0, 17, 4), 2
    offsets = torch.tensor([first, 9, 9, 26, 30], dtype=torch.int32)
    q, k, v = tensors((33, H, D), (33, G, D), (33, G, D_V))
    sinks, bias = tensors((H,), (4, 1, 17, 17), seed=4)
    mask = torch.arange(17)[:, None] % 5 != torch.arange(17) % 3
    with torch.no_grad():
        for x in (q, k, v):
            x[:first], x[30:] = np.nan, np.nan
    got = ks.attention_varlen(
        q, k, v, offsets, offsets, 17, 17, causal=True, bias=bias, mask=mask, sinks=sinks
    )
    parts = []
    for b, (i, n) in enumerate(zip(offsets[:-1].tolist(), lengths, strict=True)):
        rows = (x[None, i : i + n].transpose(1, 2) for x in (q, k, v))
        own = {"bias": bias[b : b + 1, :, :n, :n], "mask": mask[:n, :n]}
        parts.append(formula(*rows, causal=True, sinks=sinks, **own)[0].transpose(0, 1))
    want = torch.cat([torch.zeros(2, H, D_V), *parts, torch.zeros(3, H, D_V)])
    agree(got, want, {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}, 1e-5)


def test_rows_of_no_sequence_are_found_where_somebody_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For an LSE that is asked for; results and gradients are 0 before they are written."""
    found: list[int] = []
    beyond = torch_attention.rows_beyond

    def counted(rows: int, offsets: Any) -> Any:
        found.append(rows)
        return beyond(rows, offsets)

    monkeypatch.setattr(torch_attention, "rows_beyond", counted)
    offsets = torch.tensor([1, 9], dtype=torch.int32)
    q, k, v = tensors((9, H, D), (9, G, D), (9, G, D_V))
    for options, more in (({}, []), ({"return_lse": True}, [9]), ({"score_mod": _half}, [])):
        found.clear()
        got = ks.attention_varlen(q, k, v, offsets, offsets, 8, 8, **options)
        out = got[0] if "return_lse" in options else got
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert not any(x[0].any() for x in gradients) and all(x.isfinite().all() for x in gradients)
        assert found == more


def _half(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * 0.5


def test_what_a_loss_hands_down() -> None:
    """The gradient of a sum repeats one number with stride 0; that of a transpose has its columns
    apart."""
    q, k, v = qkv()
    inputs = [q, k, v]
    for reduce in (torch.sum, lambda y: (y.transpose(2, 3).contiguous() ** 2).sum()):
        mine = torch.autograd.grad(reduce(ks.attention(q, k, v)), inputs)
        theirs = torch.autograd.grad(reduce(formula(q, k, v)), inputs)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_an_expanded_bias() -> None:
    """Its base takes the sum over what it was expanded along."""
    q, k, v = qkv()
    (base,) = tensors((1, H, 1, S_K), seed=3)
    bias = base.expand(B, H, S_Q, S_K)
    agree(ks.attention(q, k, v, bias=bias), formula(q, k, v, bias=bias), {"base": base}, 1e-5)


AXES = {
    "batch": (1, H, S_Q, S_K),
    "head": (B, 1, S_Q, S_K),
    "query": (B, H, 1, S_K),
    "key": (B, H, S_Q, 1),
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    "taken", ["leaf", "part of a leaf", "asked for on the way", "retained on the way"]
)
def test_every_element_of_an_expanded_bias_has_its_own_gradient(axis: str, taken: str) -> None:
    q, k, v = qkv(torch.float64)
    (base,) = tensors(AXES[axis], seed=3, dtype=torch.float64)
    bias = base.expand(B, H, S_Q, S_K)
    if taken == "leaf":
        bias = bias.detach().requires_grad_()
    elif taken == "part of a leaf":
        bias = (
            base.detach().repeat_interleave(2, 3)[..., ::2].expand(B, H, S_Q, S_K).requires_grad_()
        )
    passed = bias[:, :, :, :] if taken == "part of a leaf" else bias
    if taken == "retained on the way":
        bias.retain_grad()
        ks.attention(q, k, v, bias=passed).square().sum().backward()
        got, full = bias.grad, bias.detach().clone().requires_grad_()
    else:
        (got,) = torch.autograd.grad(ks.attention(q, k, v, bias=passed).square().sum(), bias)
        full = bias.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(formula(q, k, v, bias=full).square().sum(), full)
    assert got.shape == (B, H, S_Q, S_K)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


def test_expanded_leaves() -> None:
    """q, k and v alike."""
    shapes = ((1, H, S_Q, D), (B, 1, S_K, D), (B, G, 1, D_V))
    whole = ((B, H, S_Q, D), (B, G, S_K, D), (B, G, S_K, D_V))
    leaves = [
        x.detach().expand(s).requires_grad_() for x, s in zip(tensors(*shapes), whole, strict=True)
    ]
    full = [x.detach().double().clone().requires_grad_() for x in leaves]
    mine = torch.autograd.grad(ks.attention(*leaves, causal=True).square().sum(), leaves)
    for got, want in zip(
        mine, torch.autograd.grad(formula(*full, causal=True).square().sum(), full), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_only_what_is_wanted() -> None:
    q, k, v = qkv()
    k.requires_grad_(False)
    options, _ = filled(OPTIONS["all"])
    options["bias"].requires_grad_(False)
    ks.attention(q, k, v, **options).sum().backward()
    assert k.grad is None and options["bias"].grad is None
    assert q.grad is not None and v.grad is not None and options["sinks"].grad is not None


def test_without_gradients_nothing_is_kept() -> None:
    """And none are needed: no operation of gradients is asked for."""
    q, k, v = qkv()
    with torch.no_grad(), kernelseam.trace() as launches:
        y = ks.attention(q, k, v, causal=True)
    assert y.grad_fn is None and len(launches) == 1
    torch.testing.assert_close(y.double(), formula(q, k, v, causal=True), rtol=1e-5, atol=1e-5)
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    q, k, v = (x.detach() for x in tensors((23, H, D), (23, G, D), (23, G, D_V)))
    y = ks.attention_varlen(q, k, v, offsets, offsets, 15, 15)
    assert y.grad_fn is None and not y[20:].any() and y[:20].any()


def test_a_graph_of_gradients_that_is_not_walked_back() -> None:
    """They are the same numbers as without one, and what does not hang on them can be
    differentiated."""
    q, k, v = qkv()
    y = ks.attention(q, k, v)
    plain = torch.autograd.grad(y.square().sum(), (q, k, v), retain_graph=True)
    actual = torch.autograd.grad(y.square().sum() + v.pow(3).sum(), (q, k, v), create_graph=True)
    for got, want, more in zip(actual, plain, (0, 0, 3 * v.detach() ** 2), strict=True):
        assert got.requires_grad
        torch.testing.assert_close(got.detach(), want + more)
    (penalty,) = torch.autograd.grad(v.pow(3).sum(), v, create_graph=True)
    (second,) = torch.autograd.grad(penalty.sum() + y.sum(), v)
    torch.testing.assert_close(
        second, 6 * v.detach() + torch.autograd.grad(ks.attention(q, k, v).sum(), v)[0]
    )


def test_options_that_are_equal_may_be_of_other_types(refused: Refused) -> None:
    """What usual calls pass on is kept by values and types: True is equal to 1 and 1.0."""
    inputs = qkv()
    for causal in (True, False):
        got = ks.attention(*inputs, causal=causal, scale=1)
        agree(
            got,
            formula(*inputs, causal=causal, scale=1),
            dict(zip("qkv", inputs, strict=True)),
            1e-4,
        )
    for wrong in (1, 1.0, 0):
        refused(
            f"causal = {wrong}: must be True or False. Pass a bool.",
            lambda wrong=wrong: ks.attention(*inputs, causal=wrong, scale=1),
        )


def test_what_is_refused(refused: Refused) -> None:
    q, k, v = qkv()
    slopes = torch.ones(H, requires_grad=True)
    refused(
        "alibi_slopes.requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: ks.attention(q, k, v, alibi_slopes=slopes),
    )
    refused(
        "k = ndarray: must be a torch tensor. Pass torch.as_tensor(…).",
        lambda: ks.attention(q, k.detach().numpy(), v),
    )
    y = ks.attention(q, k, v)
    with torch.no_grad():
        v += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert not hasattr(ks, "attention_pooled")


NEGATED: dict[str, Any] = {
    "attention": lambda q, k, v: ks.attention(q, k, v),
    "bmm": lambda q, k, v: ks.bmm(q, k, b_transposed=True),
    "bmm with an epilogue": lambda q, k, v: ks.bmm(q, k, b_transposed=True, epilogue="gelu"),
    "fused_qkv_projection": lambda q, k, v: ks.fused_qkv_projection(q[0], k[0, 0], None, 1)[0],
}


@pytest.mark.parametrize("name", NEGATED)
def test_a_gradient_whose_memory_is_negated(name: str) -> None:
    """As that of x.conj().imag is: its caller cannot resolve it."""
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64).requires_grad_() for _ in "qkv")
    result = NEGATED[name](q, k, v)
    dout = torch.randn(result.shape, dtype=torch.float64)
    lazy = torch._neg_view(-dout)
    assert lazy.is_neg()
    found = torch.autograd.grad(result, (q, k), lazy, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(result, (q, k), dout), rtol=0, atol=0)
