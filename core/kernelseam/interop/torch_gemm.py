"""Products that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at
its first use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelseam.epilogues import Epilogue
from kernelseam.interop.torch_epilogues import multiply
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    plain,
    tensors,
    wanted,
    with_matrices,
)
from kernelseam.interop.torch_library import gemm as operators
from kernelseam.interop.torch_library import gemm_epilogues
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.product_epilogues import multiply as traced_multiply
from kernelseam.ops import gemm, gemm_bwd


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.bmm`` on torch tensors, with gradients to a, b, ``bias`` and ``residual``.

    Those of a and b are one launch each; torch sums those of bias and residual, and that of an
    expanded operand over what it was expanded along. ``out_dtype`` may be torch's.
    ``implementation`` names a way of the product, ``bwd_implementation`` one of the gradients'.
    Under torch.autocast a and b are converted to its dtype. Where torch compiles, exports or
    transforms the caller, ``torch.ops.kernelseam`` is called.

    ``epilogue``: as in ``kernelseam.bmm``; its derivative is one more launch, which reads what the
    forward stored before it, in the result's dtype. Float tensors that it captures have gradients
    too, where it is a function of torch's: torch differentiates it again for these.

    Gradients are differentiable once: under ``create_graph`` a second derivative raises
    InvalidValue. Where none are wanted, nothing is kept for them.
    """
    options = {
        "a_transposed": a_transposed,
        "b_transposed": b_transposed,
        "alpha": alpha,
        "backend": backend,
    }
    return _apply(
        gemm.bmm,
        gemm_bwd.bmm_bwd,
        operators.BMM,
        a,
        b,
        bias,
        residual,
        options,
        epilogue,
        out_dtype,
        implementation,
        bwd_implementation,
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
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.matmul2d`` on torch tensors, with gradients; see ``bmm``."""
    options = {
        "a_transposed": a_transposed,
        "b_transposed": b_transposed,
        "alpha": alpha,
        "backend": backend,
    }
    return _apply(
        gemm.matmul2d,
        gemm_bwd.matmul2d_bwd,
        operators.MATMUL2D,
        a,
        b,
        bias,
        residual,
        options,
        epilogue,
        out_dtype,
        implementation,
        bwd_implementation,
    )


def _apply(
    forward: Any,
    backward: Any,
    operator: Any,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    options: dict[str, Any],
    epilogue: Epilogue | None,
    out_dtype: Any,
    implementation: str | None,
    bwd_implementation: str | None,
) -> Tensor:
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    known, wants = plain(given)
    usual = not wants and bwd_implementation is None and epilogue is None
    if usual and known is not None and "a" in known and "b" in known:
        options["out_dtype"], options["implementation"] = dtype_name(out_dtype), implementation
        return forward(**known, **options)
    operands, traced = tensors(given, ("a", "b"))
    operands = autocast(operands, ("a", "b"))
    a, b = operands["a"], operands["b"]
    if traced:
        options |= {"out_dtype": out_dtype, "implementation": implementation}
        options["bwd_implementation"] = bwd_implementation
        if epilogue is None:
            return operator(a, b, bias, residual, **options)
        own = gemm_epilogues.WITH_EPILOGUE[operator]
        return traced_multiply(own, (a, b, bias, residual, None, None, None), epilogue, options)
    check_bwd_implementation(bwd_implementation, "gemm", "a", operands)
    of_forward = {**options, "out_dtype": dtype_name(out_dtype), "implementation": implementation}
    if epilogue is not None:
        of_backward = {**options, "implementation": bwd_implementation}
        differentiated = bool(wanted(operands, tuple(given)))
        ways = (forward, of_forward), (backward, of_backward)
        return multiply(*ways, operands, epilogue, differentiated)
    if not wanted(operands, tuple(given)):
        return forward(**operands, **of_forward)
    return _Product.apply(
        (forward, of_forward),
        (backward, {**options, "implementation": bwd_implementation}),
        a,
        b,
        bias,
        residual,
    )


@differentiable_once("bmm and matmul2d")
def _gradients(ctx: Any, dc: Tensor) -> Gradients:
    (operation, options), wanted = ctx.gradients, ctx.needs_input_grad[2:]
    a, b = ctx.saved_tensors
    dbias, dresidual = operators.added_gradients(dc, ctx.added, wanted[2:])
    da = db = None
    if wanted[0] or wanted[1]:
        da, db = operation(
            with_matrices(dc.to(a.dtype)),
            a,
            b,
            a_gradient=wanted[0],
            b_gradient=wanted[1],
            sum_repeats=False,
            **options,
        )
    return None, None, da, db, dbias, dresidual


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """The operation and its gradients, each with its options."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Any,
        gradients: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        operation, options = forward
        result = operation(a, b, bias=bias, residual=residual, **options)
        ctx.gradients = gradients
        ctx.added = [None if x is None else (x.shape, x.dtype) for x in (bias, residual)]
        ctx.save_for_backward(a, b)
        return result

    backward = staticmethod(_gradients)
