"""Projections that torch differentiates: results and gradients held to those that torch's own
autograd finds."""

from __future__ import annotations

from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")
from kernelseam.interop import torch_rotary  # noqa: E402

B, S, HIDDEN, H, G, D = 2, 7, 24, 4, 2, 8
WIDTH = (H + 2 * G) * D


def tensors(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def angles(rows: int, half: int = D // 2) -> tuple[Any, Any]:
    at = torch.arange(rows)[:, None] / 10.0 ** (torch.arange(half) / half)
    return torch.cos(at), torch.sin(at)


def rotated(x: Any, cos: Any, sin: Any, style: str) -> Any:
    """[B, S, heads, D] in float64, the first elements by the tables' rows [B, S, half] or [S,
    half]."""
    half = cos.shape[-1]
    cos, sin = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    rest = x[..., 2 * half :]
    if style == "pairs":
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        both = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([both, rest], -1)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def formula(
    x: Any, weight: Any, bias: Any, layout: str, rotary: Any = None, style: str = "halves"
) -> list[Any]:
    """q, k and v in float64, as torch differentiates them."""
    y = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    y = y.unflatten(-1, (H + 2 * G, D))
    q, k, v = y.split([H, G, G], -2)
    if rotary is not None:
        q, k = (rotated(part, *rotary, style) for part in (q, k))
    return [part.transpose(-3, -2) if layout == "bhsd" else part for part in (q, k, v)]


def agree(got: Any, want: Any, inputs: dict[str, Any], limit: float) -> None:
    """The same results, and the same gradients for the same random gradients of the results."""
    generator = torch.Generator().manual_seed(9)
    douts = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in got]
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(
            x.double(), y, rtol=limit, atol=limit * float(y.detach().abs().max())
        )
    mine = torch.autograd.grad(got, list(inputs.values()), douts)
    theirs = torch.autograd.grad(want, list(inputs.values()), [d.double() for d in douts])
    for name, a, b in zip(inputs, mine, theirs, strict=True):
        assert (a.dtype, a.shape) == (inputs[name].dtype, inputs[name].shape), name
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert b.abs().max() > 1e-3 and error < limit, (name, float(error))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        ("float64", 1e-12),
        ("float32", 1e-5),
        ("float16", 3e-3),
        ("bfloat16", 2e-2),
    ],
)
def test_q_k_and_v(layout: str, dtype: str, limit: float) -> None:
    kind = getattr(torch, dtype)
    x, weight = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), dtype=kind)
    (bias,) = tensors(
        (WIDTH,), seed=2, dtype=torch.float64 if dtype == "float64" else torch.float32
    )
    got = ks.fused_qkv_projection(x, weight, bias, H, G, D, layout=layout)
    assert [y.dtype for y in got] == [kind] * 3
    agree(
        got, formula(x, weight, bias, layout), {"input": x, "weight": weight, "bias": bias}, limit
    )


@pytest.mark.parametrize("style", ["halves", "pairs"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_are_rotated_back(style: str, layout: str) -> None:
    """Of a part of the elements, from the fourth position on; of all of them, at positions in
    memory."""
    x, weight, bias = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))
    inputs = {"input": x, "weight": weight, "bias": bias}
    cos, sin = angles(S + 3, 3)
    got = ks.fused_qkv_projection(
        x,
        weight,
        bias,
        H,
        G,
        D,
        layout=layout,
        rotary=(cos, sin),
        rotary_style=style,
        first_position=3,
    )
    agree(got, formula(x, weight, bias, layout, (cos[3:], sin[3:]), style), inputs, 1e-5)
    cos, sin = angles(20)
    positions = torch.stack(
        [torch.randperm(20, generator=torch.Generator().manual_seed(b))[:S] for b in range(B)]
    )
    got = ks.fused_qkv_projection(
        x,
        weight,
        bias,
        H,
        G,
        D,
        layout=layout,
        rotary=(cos, sin),
        rotary_style=style,
        positions=positions.int(),
    )
    agree(
        got, formula(x, weight, bias, layout, (cos[positions], sin[positions]), style), inputs, 1e-5
    )


def test_tables_lie_as_float32_beside_float64() -> None:
    """They need not be aligned as what they rotate is."""
    x, weight = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), dtype=torch.float64)
    cos, sin = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in angles(S))
    assert cos.data_ptr() % 8 == sin.data_ptr() % 8 == 4
    got = ks.fused_qkv_projection(x, weight, None, H, G, rotary=(cos, sin))
    want = formula(x, weight, None, "bhsd", (cos, sin))
    agree(got, want, {"x": x, "weight": weight}, 1e-12)


def test_they_are_rotated_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by torch's operations, which are for calls that torch follows."""
    launched: list[Any] = []
    append = torch_rotary.append_paged

    def counted(*args: Any, **options: Any) -> Any:
        launched.append(options["layout"])
        return append(*args, **options)

    monkeypatch.setattr(torch_rotary, "append_paged", counted)
    tables = tuple(torch.rand(8, 4) for _ in range(2))
    for layout, rows in (("bshd", (2, 5)), ("bhsd", (2, 5)), ("bshd", (7,))):
        x, w = torch.randn(*rows, 16, requires_grad=True), torch.randn(32, 16)
        place = {} if len(rows) == 2 else {"positions": torch.arange(7, dtype=torch.int32)}
        made = ks.fused_qkv_projection(x, w, None, 2, 1, 8, rotary=tables, layout=layout, **place)
        torch.autograd.grad([y.sum() for y in made], x)
    assert launched == ["bshd", "bhsd", "bshd"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rows_of_packed_sequences(layout: str) -> None:
    x, weight = tensors((B * S, HIDDEN), (WIDTH, HIDDEN))
    cos, sin = angles(30)
    positions = torch.arange(B * S).flip(0).int()
    got = ks.fused_qkv_projection(
        x, weight, None, H, G, D, layout=layout, rotary=(cos, sin), positions=positions
    )
    at = positions.long()
    agree(
        got,
        formula(x, weight, None, layout, (cos[at], sin[at])),
        {"input": x, "weight": weight},
        1e-5,
    )


def test_in_16_bits_turned_gradients_are_rounded_once_more() -> None:
    x, weight = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), dtype=torch.bfloat16)
    cos, sin = angles(S)
    got = ks.fused_qkv_projection(x, weight, None, H, G, D, rotary=(cos, sin))
    agree(got, formula(x, weight, None, "bhsd", (cos, sin)), {"input": x, "weight": weight}, 2e-2)


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 3e-3)]
)
@pytest.mark.parametrize("form", ["rows", "bhsd", "bshd", "transposed", "packed"])
def test_the_output(form: str, dtype: str, limit: float) -> None:
    """attn_out as rows, as heads in each order, as a view of the other order, and as packed
    rows."""
    kind = getattr(torch, dtype)
    shape = {
        "rows": (B, S, H * D),
        "bhsd": (B, H, S, D),
        "bshd": (B, S, H, D),
        "transposed": (B, S, H, D),
        "packed": (B * S, H * D),
    }[form]
    attn_out, weight, residual = tensors(shape, (HIDDEN, H * D), (*shape[:-1], HIDDEN), dtype=kind)
    if form != "packed":
        (residual,) = tensors((B, S, HIDDEN), seed=3, dtype=kind)
    (bias,) = tensors(
        (HIDDEN,), seed=2, dtype=torch.float64 if dtype == "float64" else torch.float32
    )
    arguments = attn_out.transpose(1, 2) if form == "transposed" else attn_out
    layout = "bshd" if form == "bshd" else "bhsd"
    got = ks.fused_output_projection_residual(arguments, weight, bias, residual, layout=layout)
    rows = attn_out.transpose(1, 2) if form == "bhsd" else attn_out
    rows = rows if form in ("rows", "packed") else rows.flatten(2)
    want = (
        torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
        + residual.double()
    )
    inputs = {"attn_out": attn_out, "weight": weight, "bias": bias, "residual": residual}
    agree([got], [want], inputs, limit)


def test_only_what_is_wanted_is_computed_and_kept() -> None:
    x, weight, bias = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))
    for frozen, kept in (("weight", 1), ("input", 1), ("", 2)):
        arguments = {"input": x, "weight": weight, "bias": bias}
        if frozen:
            arguments[frozen] = arguments[frozen].detach()
        q, _, _ = ks.fused_qkv_projection(**arguments, num_heads=H, num_kv_heads=G)
        assert sum(x is not None for x in q.grad_fn.saved_tensors) == kept
        wanted = [t for n, t in arguments.items() if n != frozen]
        gradients = torch.autograd.grad(q.sum(), wanted)
        for a, b in zip(
            gradients,
            torch.autograd.grad(
                formula(x, weight, bias, "bhsd")[0].sum(),
                [{"input": x, "weight": weight, "bias": bias}[n] for n in arguments if n != frozen],
            ),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    q, _, _ = ks.fused_qkv_projection(x.detach(), weight.detach(), bias, H, G)
    assert set(q.grad_fn.saved_tensors) == {None}
    (d_bias,) = torch.autograd.grad(q.sum(), [bias])
    torch.testing.assert_close(
        d_bias, torch.cat([torch.full((H * D,), B * S), torch.zeros(2 * G * D)])
    )
    residual, attn_out, w = tensors((B, S, HIDDEN), (B, S, H * D), (HIDDEN, H * D))
    y = ks.fused_output_projection_residual(attn_out.detach(), w.detach(), None, residual)
    assert set(y.grad_fn.saved_tensors) == {None}
    dout = torch.randn(B, S, HIDDEN)
    with kernelseam.trace() as launches:
        (d_residual,) = torch.autograd.grad(y, [residual], dout)
    assert launches == [] and torch.equal(d_residual, dout)


def test_the_residual_s_gradient_is_the_result_s() -> None:
    attn_out, w, residual = tensors((B, S, H * D), (HIDDEN, H * D), (B, S, HIDDEN))
    y = ks.fused_output_projection_residual(attn_out, w, None, residual)
    dout = torch.randn(B, S, HIDDEN)
    gradients = torch.autograd.grad(y, [attn_out, residual], dout)
    assert gradients[1].data_ptr() == dout.data_ptr(), "no copy"
    (residual,) = tensors((B, S, HIDDEN), dtype=torch.float64)
    with pytest.raises(
        kernelseam.errors.InvalidValue, match=r"^residual = an array of float64: must be no wider"
    ):
        ks.fused_output_projection_residual(attn_out, w, None, residual)
    attn_out, w = (x.detach().half().requires_grad_() for x in (attn_out, w))
    (residual,) = tensors((B, S, HIDDEN))
    y = ks.fused_output_projection_residual(attn_out, w, None, residual)
    (d_residual,) = torch.autograd.grad(y.sum(), [residual])
    assert (
        y.dtype == torch.float16 and d_residual.dtype == torch.float32 and (d_residual == 1).all()
    )


def test_without_gradients_nothing_is_kept() -> None:
    x, weight, bias = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))
    pages = [torch.full((6, 4, G, D), float("nan")) for _ in "kv"]
    table = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32)
    with torch.no_grad(), kernelseam.trace() as launches:
        q, k, v = ks.fused_qkv_projection(x, weight, bias, H, G, D)
        alone = ks.fused_qkv_projection(
            x, weight, bias, H, G, D, k_pages=pages[0], v_pages=pages[1], block_table=table
        )
    assert q.grad_fn is None and len(launches) == 2 and torch.equal(alone, q)
    for y, where in zip((k, v), pages, strict=True):
        torch.testing.assert_close(
            where[table.long()].flatten(1, 2)[:, :S].transpose(1, 2), y, rtol=0, atol=0
        )
        assert where[[1, 4]].isnan().all()


def test_a_layer_of_attention_between_them() -> None:
    """Projection, attention, projection and residual: gradients through all of it."""
    x, weight, bias, w, b = tensors(
        (B, S, HIDDEN), (WIDTH, HIDDEN), (WIDTH,), (HIDDEN, H * D), (HIDDEN,)
    )
    cos, sin = angles(S)
    q, k, v = ks.fused_qkv_projection(x, weight, bias, H, G, D, rotary=(cos, sin))
    got = ks.fused_output_projection_residual(ks.attention(q, k, v, causal=True), w, b, x)
    q, k, v = formula(x, weight, bias, "bhsd", (cos, sin))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = (
        torch.nn.functional.linear(out.transpose(1, 2).flatten(2), w.double(), b.double())
        + x.double()
    )
    agree([got], [want], {"input": x, "weight": weight, "bias": bias, "w": w, "b": b}, 2e-5)


def test_what_is_refused(refused: Refused) -> None:
    x, weight, bias = tensors((B, S, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))
    cos, sin = angles(S)
    refused(
        "rotary[0].requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: ks.fused_qkv_projection(
            x, weight, bias, H, G, D, rotary=(cos.requires_grad_(), sin)
        ),
    )
    refused(
        "rotary = Tensor: must be (cosines, sines). Pass two tensors.",
        lambda: ks.fused_qkv_projection(x, weight, bias, H, G, D, rotary=sin),
    )
    refused(
        "weight = ndarray: must be a torch tensor. Pass torch.as_tensor(…).",
        lambda: ks.fused_qkv_projection(x, weight.detach().numpy(), bias, H, G, D),
    )
    refused(
        "k_pages = given: gradients to input, weight, bias do not flow through pages. Call under "
        "torch.no_grad(), or leave the pages out.",
        lambda: ks.fused_qkv_projection(
            x,
            weight,
            bias,
            H,
            G,
            D,
            k_pages=torch.zeros(1),
            v_pages=torch.zeros(1),
            block_table=torch.zeros(1),
        ),
    )


def test_expanded_leaves() -> None:
    """Each element of each operand has a gradient of its own, as torch's."""
    small = ((1, S, HIDDEN), (1, HIDDEN))
    x, weight = (
        t.detach().expand(s).requires_grad_()
        for t, s in zip(
            tensors(*small, dtype=torch.float64), ((B, S, HIDDEN), (WIDTH, HIDDEN)), strict=True
        )
    )
    (bias,) = tensors((WIDTH,), dtype=torch.float64, seed=2)
    full = [t.detach().clone().requires_grad_() for t in (x, weight)]
    q, k, v = ks.fused_qkv_projection(x, weight, bias, H, G, D)
    mine = torch.autograd.grad(sum(t.square().sum() for t in (q, k, v)), (x, weight))
    theirs = torch.autograd.grad(sum(t.square().sum() for t in formula(*full, bias, "bhsd")), full)
    attn_out, w, residual = (
        t.detach().expand(s).requires_grad_()
        for t, s in zip(
            tensors((B, 1, S, D), (1, H * D), (1, S, HIDDEN), dtype=torch.float64),
            ((B, H, S, D), (HIDDEN, H * D), (B, S, HIDDEN)),
            strict=True,
        )
    )
    leaves = (attn_out, w, residual)
    full = [t.detach().clone().requires_grad_() for t in leaves]
    mine += torch.autograd.grad(
        ks.fused_output_projection_residual(attn_out, w, None, residual).square().sum(), leaves
    )
    rows = full[0].transpose(1, 2).flatten(2)
    theirs += torch.autograd.grad(
        (torch.nn.functional.linear(rows, full[1]) + full[2]).square().sum(), full
    )
    for got, want in zip(mine, theirs, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
