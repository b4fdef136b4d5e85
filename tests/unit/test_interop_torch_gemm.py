"""Products that torch differentiates, held to torch's own differentiation in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.interop import torch as ks
from refusals import Refused

torch = pytest.importorskip("torch", reason="torch is not installed")


def tensors(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_finite_differences(a_transposed: bool, b_transposed: bool) -> None:
    """Heads that share a b, a bias for each head, a residual: all of them at once."""
    of_a, of_b = (5, 3) if a_transposed else (3, 5), (6, 5) if b_transposed else (5, 6)
    a, b, bias, residual = tensors((2, 4, *of_a), (2, 2, *of_b), (4, 6), (2, 4, 3, 6))

    def call(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        return ks.bmm(
            a,
            b,
            a_transposed=a_transposed,
            b_transposed=b_transposed,
            alpha=0.5,
            bias=bias,
            residual=residual,
        )

    assert torch.autograd.gradcheck(call, (a, b, bias, residual))


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_where_nothing_wants_a_gradient_autograd_is_not_asked(
    around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor under autocast; where gradients are enabled, tensors that want none are not kept."""
    monkeypatch.setattr(
        torch.autograd.Function, "apply", lambda *_: pytest.fail("a node of the graph was made")
    )
    a, b, bias = (x.detach() for x in tensors((2, 3, 5), (2, 5, 6), (6,), dtype=torch.float32))
    q = a[None]
    with around():
        if around is torch.no_grad:
            a.requires_grad_()
            q.requires_grad_()
        torch.testing.assert_close(ks.bmm(a, b, bias=bias), torch.bmm(a, b) + bias)
        torch.testing.assert_close(ks.matmul2d(a[0], b[0], bwd_implementation="numpy"), a[0] @ b[0])
        assert ks.attention(q, q, q).shape == q.shape
        with torch.autocast("cpu", torch.bfloat16):
            assert ks.bmm(a, b).dtype == torch.bfloat16
            assert ks.attention(q, q, q).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 6)])
def test_biases_of_a_batch(shape: tuple[int, ...]) -> None:
    a, b, bias = tensors((2, 3, 5), (2, 5, 6), shape)
    ours, theirs = (
        ks.bmm(a, b, bias=bias),
        torch.bmm(a, b) + (bias if bias.ndim == 1 else bias[:, None]),
    )
    torch.testing.assert_close(ours, theirs)
    dc = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for got, want in zip(
        *(torch.autograd.grad(y, (a, b, bias), dc) for y in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_an_expanded_weight() -> None:
    x, w = tensors((6, 3, 5), (5, 4))
    y = ks.bmm(x, w.expand(6, 5, 4))
    dc = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    with kernelseam.trace() as launches:
        dx, dw = torch.autograd.grad(y, (x, w), dc)
    assert len(launches) == 2 and dw.shape == w.shape
    torch.testing.assert_close(dw, torch.einsum("bmk,bmn->kn", x, dc))
    torch.testing.assert_close(dx, dc @ w.T)


REPEATED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "batches of a": ((1, 4, 3, 5), (2, 2, 5, 6)),
    "heads of a": ((2, 1, 3, 5), (2, 2, 5, 6)),
    "rows of a": ((2, 4, 1, 5), (2, 2, 5, 6)),
    "batches of b": ((2, 4, 3, 5), (1, 2, 5, 6)),
    "heads of b": ((2, 4, 3, 5), (2, 1, 5, 6)),
    "columns of b": ((2, 4, 3, 5), (2, 2, 5, 1)),
    "much of both": ((1, 1, 3, 5), (1, 1, 5, 6)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_every_element_of_an_expanded_leaf_has_its_own_gradient(name: str) -> None:
    whole = (2, 4, 3, 5), (2, 2, 5, 6)
    a, b = (
        x.detach().expand(s).requires_grad_()
        for x, s in zip(tensors(*REPEATED[name]), whole, strict=True)
    )
    full = [x.detach().clone().requires_grad_() for x in (a, b)]
    ks.bmm(a, b).square().sum().backward()
    (full[0] @ full[1].repeat_interleave(2, 1)).square().sum().backward()
    for got, want in zip((a, b), full, strict=True):
        assert got.grad.shape == want.shape
        torch.testing.assert_close(got.grad, want.grad)


def test_gradients_of_expanded_operands_on_the_way() -> None:
    x, w, bias, residual = tensors((6, 3, 5), (5, 4), (4,), (3, 4))
    shared, added, kept = w.expand(6, 5, 4), bias.expand(6, 4), residual.expand(6, 3, 4)
    y = ks.bmm(x, shared, bias=added, residual=kept)
    dc = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    want = torch.bmm(x, shared) + added[:, None] + kept
    on_the_way = (shared, added, kept)
    for got, true in zip(*(torch.autograd.grad(r, on_the_way, dc) for r in (y, want)), strict=True):
        torch.testing.assert_close(got, true)
    for row in (0, 1):  # rows of matmul2d's operands repeat as well
        shapes = ((1, 5), (5, 4)) if row == 0 else ((3, 5), (5, 1))
        a, b = (
            x.detach().expand(s).requires_grad_()
            for x, s in zip(tensors(*shapes), ((3, 5), (5, 4)), strict=True)
        )
        full = [x.detach().clone().requires_grad_() for x in (a, b)]
        mine = torch.autograd.grad(ks.matmul2d(a, b).square().sum(), (a, b))
        for got, true in zip(
            mine, torch.autograd.grad((full[0] @ full[1]).square().sum(), full), strict=True
        ):
            torch.testing.assert_close(got, true)


def test_matmul2d_in_half_precision_with_a_float32_result() -> None:
    """The gradient of the result is converted to the inputs' dtype; theirs is the inputs'."""
    a, b = tensors((7, 40), (40, 9), dtype=torch.float16)
    (bias,) = tensors((9,), seed=1, dtype=torch.float32)
    for dtype in (torch.float32, "float32", None):
        y = ks.matmul2d(a, b, bias=bias, out_dtype=dtype)
        assert y.dtype is (torch.float32 if dtype is not None else torch.float16)
        torch.testing.assert_close(y.double(), a.double() @ b.double() + bias, rtol=2e-3, atol=2e-3)
        da, db, dbias = torch.autograd.grad(y.square().sum(), (a, b, bias))
        assert (da.dtype, db.dtype, dbias.dtype) == (torch.float16, torch.float16, torch.float32)
        exact = [x.detach().double().requires_grad_() for x in (a, b, bias)]
        want = torch.autograd.grad((exact[0] @ exact[1] + exact[2]).square().sum(), exact)
        for got, true in zip((da, db, dbias), want, strict=True):
            assert (got.double() - true).abs().max() < 4e-3 * true.abs().max()


def test_what_a_loss_hands_down() -> None:
    """The gradient of a sum repeats one number with stride 0; that of a transpose has its columns
    apart."""
    a, b = tensors((2, 3, 5), (2, 5, 4))
    for reduce in (
        torch.sum,
        lambda y: (y.transpose(1, 2).contiguous() ** 2).sum(),
        lambda y: y[:, :, :1].sum(),
    ):
        mine = torch.autograd.grad(reduce(ks.bmm(a, b)), (a, b))
        theirs = torch.autograd.grad(reduce(torch.bmm(a, b)), (a, b))
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y)


def test_only_what_is_wanted() -> None:
    a, b, bias, residual = tensors((3, 5), (5, 4), (4,), (3, 4))
    y = ks.matmul2d(a.detach(), b, bias=bias, residual=residual.detach())
    with kernelseam.trace() as launches:
        y.sum().backward()
    assert len(launches) == 1
    assert b.grad is not None and bias.grad.tolist() == [3.0] * 4 and residual.grad is None
    y = ks.matmul2d(a.detach(), b.detach(), residual=residual)
    with kernelseam.trace() as launches:
        y.sum().backward()
    assert launches == [] and residual.grad.tolist() == [[1.0] * 4] * 3
    with torch.no_grad():
        assert ks.matmul2d(a, b).grad_fn is None


def test_what_is_refused(refused: Refused) -> None:
    a, b = tensors((3, 5), (5, 4))
    refused(
        "b = ndarray: must be a torch tensor. Pass torch.as_tensor(…).",
        lambda: ks.matmul2d(a, np.zeros((5, 4))),
    )
    assert not hasattr(ks, "matmul3d")
