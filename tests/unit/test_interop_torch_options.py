"""Options of the functions that torch differentiates: the LSE with its gradient, other dtypes of
the result, autocast, pages, nested tensors, merged states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import pytest
from attention_formula import attention
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_operators import cells, packed, pages, projected, qkv  # noqa: E402

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "both": lambda out, lse: out.sin().sum() + (lse * lse.detach().cos()).sum(),
    "lse": lambda out, lse: lse.square().sum(),
    "out": lambda out, lse: out.square().sum(),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_lse_has_a_gradient(loss: str, layout: str) -> None:
    exact = [x.detach().double().requires_grad_() for x in qkv()]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in exact)
        transposed = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
        out, lse = ks.attention(*transposed, causal=True, layout=layout, return_lse=True)
        if layout == "bshd":
            out = out.transpose(1, 2)
        true = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want, want_lse = attention(*true, causal=True)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        assert lse.dtype == kind and lse.shape == (2, 4, 6)
        torch.testing.assert_close(lse.double(), want_lse, rtol=limit, atol=limit)
        got = torch.autograd.grad(LOSSES[loss](out, lse), (q, k, v), allow_unused=loss == "lse")
        expected = torch.autograd.grad(
            LOSSES[loss](want, want_lse), true, allow_unused=loss == "lse"
        )
        for a, b in zip(got, expected, strict=True):
            b = torch.zeros_like(a).double() if b is None else b
            error = (a.double() - b).abs().max()
            assert error <= 4 * limit * max(1.0, float(b.abs().max())), (dtype, float(error))


def test_the_lse_of_bias_sinks_and_packed_rows_by_finite_differences() -> None:
    q, k, v = (x.detach().double()[:1, :, :3, :4].requires_grad_() for x in qkv())
    bias, sinks = cells(4, 3, 3).double().detach().requires_grad_(), cells(4)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return ks.attention(q, k, v, bias=bias, softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    rows = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]

    def sequences(q: Any, k: Any, v: Any) -> Any:
        return ks.attention_varlen(q, k, v, offsets, offsets, 2, 2, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(sequences, rows)
    # of float32 sinks: those of the formula
    _, lse = ks.attention(q, k, v, sinks=sinks, return_lse=True)
    (got,) = torch.autograd.grad(lse.square().sum(), sinks)
    other = sinks.detach().double().requires_grad_()
    _, of = attention(q, k, v, sinks=other)
    (want,) = torch.autograd.grad(of.square().sum(), other)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_rows_of_no_sequence() -> None:
    q, k, v, at, of = packed()
    out, lse = ks.attention_varlen(q, k, v, at, of, 4, 5, return_lse=True)
    assert out[6].eq(0).all() and lse[:, 6].eq(-torch.inf).all() and lse[:, :6].isfinite().all()
    with torch.no_grad():
        _, again = ks.attention_varlen(q, k, v, at, of, 4, 5, return_lse=True)
    assert torch.equal(lse, again)


def test_other_dtypes_of_the_result() -> None:
    """In float32 of halves, as for merging; gradients are of q's dtype."""
    q, k, v = (x.detach().half().requires_grad_() for x in qkv())
    wide = ks.attention(q, k, v, out_dtype=torch.float32, batch_invariant=True)
    assert wide.dtype == torch.float32
    want, _ = attention(q, k, v, causal=True)
    narrow = ks.attention(q, k, v, causal=True)
    wide = ks.attention(q, k, v, causal=True, out_dtype="float32")
    assert (wide.double() - want).abs().max() < (narrow.double() - want).abs().max()
    mine, theirs = (torch.autograd.grad(y.float().sum(), (q, k, v)) for y in (wide, narrow))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    x, w, b = projected()
    results = ks.fused_qkv_projection(x.half(), w.half(), b, 4, 2, out_dtype=torch.float32)
    for y, rows in zip(results, (slice(0, 32), slice(32, 48), slice(48, 64)), strict=True):
        assert y.dtype == torch.float32
        (dw,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
        want = torch.zeros_like(w)
        want[rows] = x.detach().sum((0, 1))
        torch.testing.assert_close(dw, want, rtol=1e-2, atol=1e-2)
    heads, hidden = cells(2, 4, 6, 8), cells(12, 32)
    y = ks.fused_output_projection_residual(heads.half(), hidden.half(), out_dtype=torch.float32)
    (dw,) = torch.autograd.grad(y.sum(), hidden)
    want = heads.detach().sum((0, 2)).reshape(1, 32).expand(12, 32)
    assert y.dtype == torch.float32
    torch.testing.assert_close(dw, want, rtol=1e-2, atol=1e-2)


def test_states_of_parts_are_merged_with_their_gradients() -> None:
    """Attention over the parts of the keys, merged, beside attention over all."""
    exact = [x.detach().double().requires_grad_() for x in qkv()]
    q, k, v = exact
    parts = [
        ks.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 9))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = ks.merge_states(outs, lses)
    whole, whole_lse = ks.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    for make in LOSSES.values():
        got, want = (
            torch.autograd.grad(make(*y), exact, retain_graph=True, allow_unused=True)
            for y in ((out, lse), (whole, whole_lse))
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_states_with_the_head_after_the_row() -> None:
    outs, lses = cells(3, 2, 4, 5, 3), cells(3, 2, 4, 5)
    other = outs.detach().transpose(2, 3).contiguous().requires_grad_()
    out, lse = ks.merge_states(outs, lses)
    found, found_lse = ks.merge_states(other, lses, layout="bshd")
    torch.testing.assert_close(found.transpose(1, 2), out)
    torch.testing.assert_close(found_lse, lse)
    (wanted,) = torch.autograd.grad(out.square().sum() + lse.sum(), outs)
    (got,) = torch.autograd.grad(found.square().sum() + found_lse.sum(), other)
    torch.testing.assert_close(got.transpose(2, 3), wanted)
    other_lses = lses.detach().requires_grad_()
    (of_lses,) = torch.autograd.grad(
        ks.merge_states(other.detach(), other_lses, layout="bshd")[0].square().sum(), other_lses
    )
    (as_before,) = torch.autograd.grad(ks.merge_states(outs.detach(), lses)[0].square().sum(), lses)
    torch.testing.assert_close(of_lses, as_before)


def test_a_part_that_saw_nothing_takes_no_gradient() -> None:
    outs, lses = cells(2, 1, 1, 2, 3, grad=False), cells(2, 1, 1, 2, grad=False)
    lses[0, 0, 0, 0] = lses[:, 0, 0, 1] = -torch.inf
    outs[0, 0, 0, 0] = torch.nan  # which is not read
    outs.requires_grad_()
    lses.requires_grad_()
    out, lse = ks.merge_states(outs, lses)
    douts, dlses = torch.autograd.grad(out.square().sum() + lse[0, 0, 0], (outs, lses))
    assert douts[0, 0, 0, 0].eq(0).all() and dlses[0, 0, 0].eq(0).all()
    torch.testing.assert_close(douts[1, 0, 0, 0], 2 * outs[1, 0, 0, 0])
    assert dlses[1, 0, 0].tolist() == [1, 0] and douts[:, 0, 0, 1].eq(0).all()


def test_pages_and_what_they_refuse(refused: Refused) -> None:
    q, k, v, table, now = pages()
    want = kernelseam.attention_paged(q, k, v, table, now, return_lse=True)
    got = ks.attention_paged(q, k, v, table, now, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    refused(
        "k_pages.requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: ks.attention_paged(q, k.clone().requires_grad_(), v, table, now),
    )
    refused(
        "block_table = None: must be a torch tensor. Give it.",
        lambda: ks.attention_paged(q, k, v, None, now),
    )
    refused(
        "out = given: results are new, on torch's current stream. Leave it out.",
        lambda: ks.attention_paged(q, k, v, table, now, out=q),
    )


def test_autocast() -> None:
    """Products in autocast's dtype, as torch's own; float64 as it is; nothing without autocast."""
    q, k, v = qkv()
    x, w, b = projected()
    heads, hidden = cells(2, 4, 6, 8), cells(12, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = {
            "attention": ks.attention(q, k, v, bias=cells(4, 6, 9), sinks=cells(4)),
            "sdpa": ks.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "bmm": ks.bmm(q[:, 0], k[:, 0].mT, bias=cells(9)),
            "matmul2d": ks.matmul2d(q[0, 0], k[0, 0].mT),
            "qkv": ks.fused_qkv_projection(x, w, b, 4, 2)[1],
            "output": ks.fused_output_projection_residual(heads, hidden, residual=x),
        }
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        wide = ks.bmm(q[:, 0].double(), k[:, 0].mT.double())
        with torch.autocast("cpu", enabled=False):
            assert ks.attention(q, k, v).dtype == torch.float32
    assert {n: y.dtype for n, y in results.items()} == dict.fromkeys(results, torch.bfloat16)
    assert wide.dtype == torch.float64 and theirs.dtype == torch.bfloat16
    torch.testing.assert_close(results["sdpa"], theirs, rtol=2e-2, atol=2e-2)
    for name, y in results.items():
        leaf = {"qkv": x, "output": heads}.get(name, q)
        (gradient,) = torch.autograd.grad(y.float().sum(), leaf, retain_graph=True)
        assert gradient.dtype == torch.float32 and gradient.abs().max() > 1e-3, name


def nested(lengths: tuple[int, ...], heads: int, seed: int) -> list[Any]:
    return [cells(n, heads, 8, seed=seed + n) for n in lengths]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nested_tensors_are_packed_rows(layout: str) -> None:
    parts = [nested((3, 5, 2), h, 10 * h + i) for i, h in enumerate((4, 2, 2))]

    def jagged(x: Any) -> Any:
        results = torch.nested.as_nested_tensor(x, layout=torch.jagged)
        return results.transpose(1, 2) if layout == "bhsd" else results

    q = jagged(parts[0])
    k, v = (
        torch.nested.nested_tensor_from_jagged(torch.cat(x), jagged(parts[0]).offsets())
        for x in parts[1:]
    )
    if layout == "bhsd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    out = ks.attention(q, k, v, causal=True, layout=layout)
    assert out.is_nested and out.layout is torch.jagged
    actual = out.transpose(1, 2) if layout == "bhsd" else out
    for i, got in enumerate(actual.unbind()):
        rows = [x[i].detach().double().transpose(0, 1)[None] for x in parts]
        want, _ = attention(*rows, causal=True)
        torch.testing.assert_close(got.double(), want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    actual.values().square().sum().backward()
    leaves = [x.detach().double().requires_grad_() for x in parts[0]]
    for i, leaf in enumerate(leaves):
        rows = [leaf.transpose(0, 1)[None]]
        rows += [x[i].detach().double().transpose(0, 1)[None] for x in parts[1:]]
        attention(*rows, causal=True)[0].square().sum().backward()
        torch.testing.assert_close(parts[0][i].grad.double(), leaf.grad, rtol=1e-4, atol=1e-5)


def test_nested_tensors_with_gaps_and_the_remedy(refused: Refused) -> None:
    rows, offsets = cells(16, 4, 8), torch.tensor([0, 8, 16])
    x = torch.nested.nested_tensor_from_jagged(rows, offsets, lengths=torch.tensor([3, 5]))
    x = x.transpose(1, 2)
    refused(
        "q = with gaps between its rows: must lie without. Pass torch.nested.as_nested_tensor("
        "q.unbind(), layout=torch.jagged).",
        lambda: ks.attention(x, x, x),
    )
    dense = torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged)
    for got, start, n in zip(
        ks.attention(dense, dense, dense).unbind(), (0, 8), (3, 5), strict=True
    ):
        part = rows[start : start + n].transpose(0, 1)[None]
        torch.testing.assert_close(got, ks.attention(part, part, part)[0])


def test_nested_tensors_that_are_refused(refused: Refused) -> None:
    rows = nested((3, 5), 4, 1)
    results = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    transposed = results.transpose(1, 2)
    refused(
        "k.layout = torch.strided: must be torch.jagged as q's is. Nest all of q, k and v, or "
        "none.",
        lambda: ks.attention(transposed, cells(2, 4, 5, 8), transposed),
    )
    refused(
        "q = ragged along axis 1: must be ragged along axis 2, as layout says. Check layout, or "
        "transpose.",
        lambda: ks.attention(results, results, results),
    )
    refused(
        "return_lse = True: the LSE of packed rows is [H, T], no nested tensor. Call "
        "attention_varlen with x.values() and x.offsets().",
        lambda: ks.attention(transposed, transposed, transposed, return_lse=True),
    )
    refused(
        "attn_mask = given: nested tensors have none. Call attention_varlen with its mask.",
        lambda: ks.scaled_dot_product_attention(
            transposed, transposed, transposed, attn_mask=torch.ones(5, 5) > 0
        ),
    )
