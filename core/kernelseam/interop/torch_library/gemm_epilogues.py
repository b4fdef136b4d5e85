"""``torch.ops.kernelseam.bmm_epilogue`` and ``matmul2d_epilogue``, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelseam.interop.torch_library import flops, gemm
from kernelseam.interop.torch_library.product_epilogues import (
    Derivative,
    Given,
    Product,
    differentiated,
    with_epilogue,
)
from kernelseam.ops import gemm as ops
from kernelseam.ops import gemm_bwd

Tensor = Any


def _gradients(operator: Any) -> Callable[..., dict[str, Tensor | None]]:
    def gradients(ctx: Any, saved: Given, derivative: Derivative) -> dict[str, Tensor | None]:
        dc, a, b = derivative(), saved["a"], saved["b"]
        assert dc is not None
        of_a, of_b, *others = (n in ctx.needed for n in gemm.OPERANDS[:4])
        result: dict[str, Tensor | None] = {}
        if of_a or of_b:
            wants = {"a_gradient": of_a, "b_gradient": of_b}
            da, db = operator(dc.to(a.dtype), a, b, **wants, **ctx.options)
            result = {"a": da if of_a else None, "b": db if of_b else None}
        added = gemm.OPERANDS[2:4]
        layouts = [ctx.layouts.get(n) for n in added]
        return result | dict(zip(added, gemm.added_gradients(dc, layouts, others), strict=True))

    return gradients


def _product(name: str, function: Any, ranks: tuple[int, ...], gradients: Any) -> Product:
    return Product(
        name,
        "gemm",
        gemm.OPERANDS,
        gemm.OPERAND_SCHEMA,
        gemm.OPTION_SCHEMA,
        function,
        lambda given, options: gemm.shape_of(ranks, given, options),
        lambda a: gemm.OPERANDS[2:4] if a.itemsize == 1 else gemm.OPERANDS[:4],
        ("a", "b"),
        ("a_transposed", "b_transposed", "alpha", "backend"),
        _gradients(gradients),
        flops.product,
        gemm.RULES,
    )


_BMM = "bmm", ops.bmm, (3, 4)
_MATMUL2D = "matmul2d", ops.matmul2d, (2,)
WITH_EPILOGUE = {
    gemm.BMM: with_epilogue(_product(*_BMM, gemm.BMM_BWD)),
    gemm.MATMUL2D: with_epilogue(_product(*_MATMUL2D, gemm.MATMUL2D_BWD)),
}
"""By the operator without one."""
_BOTH = "bmm and matmul2d"
DIFFERENTIATED = {
    "bmm": differentiated(_product(*_BMM, gemm.bwd_computed(gemm_bwd.bmm_bwd)), _BOTH),
    "matmul2d": differentiated(
        _product(*_MATMUL2D, gemm.bwd_computed(gemm_bwd.matmul2d_bwd)), _BOTH
    ),
}
"""Where nothing traces the call, by the function's name."""
