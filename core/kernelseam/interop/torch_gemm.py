"""Products that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at its first use."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernelseam.errors import InvalidValue
from kernelseam.ops import gemm, gemm_bwd

Tensor = Any


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.bmm`` on torch tensors, with gradients to a, b, ``bias`` and ``residual``.

    Those of a and b are one launch each, the sum over what an expanded one repeats along included; torch sums those of
    bias and residual. ``out_dtype`` may be torch's. ``implementation`` names a way of the product,
    ``bwd_implementation`` one of the gradients'. Gradients are differentiable once. Where none are wanted, nothing is
    kept for them.
    """
    options = {"a_transposed": a_transposed, "b_transposed": b_transposed, "alpha": alpha, "backend": backend}
    return _apply(
        gemm.bmm, gemm_bwd.bmm_bwd, a, b, bias, residual, options, out_dtype, implementation, bwd_implementation
    )


def matmul2d(
    a: Tensor,
    b: Tensor,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.matmul2d`` on torch tensors, with gradients; see ``bmm``."""
    options = {"a_transposed": a_transposed, "b_transposed": b_transposed, "alpha": alpha, "backend": backend}
    return _apply(
        gemm.matmul2d, gemm_bwd.matmul2d_bwd, a, b, bias, residual, options, out_dtype, implementation,
        bwd_implementation,
    )


def _apply(
    forward: Any, backward: Any, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None,
    options: dict[str, Any], out_dtype: Any, implementation: str | None, bwd_implementation: str | None,
) -> Tensor:
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    for name, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise InvalidValue(name, type(x).__name__, "must be a torch tensor", "Pass torch.as_tensor(…)")
    if isinstance(out_dtype, torch.dtype):
        out_dtype = str(out_dtype).removeprefix("torch.")
    shapes = a.shape, b.shape
    return _Product.apply(
        (forward, {**options, "out_dtype": out_dtype, "implementation": implementation}),
        (backward, {**options, "implementation": bwd_implementation}), shapes, _once(a), _once(b), bias, residual,
    )


def _once(x: Tensor) -> Tensor:
    """A tensor with extent 1 where it is expanded: its gradient is summed there, as torch's own would be in the end."""
    for axis, (extent, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if extent > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


def _gradients(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    (operation, options), wanted = ctx.gradients, ctx.needs_input_grad[3:]
    a, b = (x.expand(shape) for x, shape in zip(ctx.saved_tensors, ctx.shapes, strict=True))
    bias, residual = ctx.added
    dbias = dc.sum_to_size(*bias[0][:-1], 1, bias[0][-1]).squeeze(-2).to(bias[1]) if wanted[2] else None
    dresidual = dc.to(residual[1]) if wanted[3] else None
    da = db = None
    if wanted[0] or wanted[1]:
        dc = dc.to(a.dtype)
        if not any(n == 1 or s == 1 for n, s in zip(dc.shape[-2:], dc.stride()[-2:], strict=True)):
            dc = dc.contiguous()  # that of sum() repeats one number
        da, db = operation(dc, a, b, a_gradient=wanted[0], b_gradient=wanted[1], **options)
    return None, None, None, da, db, dbias, dresidual


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """The operation and its gradients with their options, and the shapes that a and b are expanded to."""

    @staticmethod
    def forward(
        ctx: Any, forward: Any, gradients: Any, shapes: Any, a: Tensor, b: Tensor, bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        operation, options = forward
        ctx.gradients, ctx.shapes = gradients, shapes
        ctx.added = [None if x is None else (x.shape, x.dtype) for x in (bias, residual)]
        ctx.save_for_backward(a, b)
        return operation(a.expand(shapes[0]), b.expand(shapes[1]), bias=bias, residual=residual, **options)

    backward = staticmethod(once_differentiable(_gradients))
