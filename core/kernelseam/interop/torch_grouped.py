"""Grouped products that torch differentiates. Imports torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelseam.epilogues import Epilogue, reduces, refused_reductions
from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    plain,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library import grouped_epilogues
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.grouped import (
    DIFFERENTIABLE,
    GROUPED_MM,
    INDICES,
    OPERANDS,
)
from kernelseam.interop.torch_library.product_epilogues import multiply
from kernelseam.ops import grouped_gemm


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    a_indices: Tensor | None = None,
    out_indices: Tensor | None = None,
    out_factors: Tensor | None = None,
    alpha: float = 1,
    out_dtype: Any = None,
    precision: str | None = None,
    epilogue: Epilogue | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.grouped_mm`` on torch tensors, with gradients to a, b and ``out_factors``.

    Those of a and b are grouped products, one launch each, and differentiate again; rows that
    ``a_indices`` took several times get the sum of theirs.

    Where ``offs`` leaves a rest of a and b, its gradient is 0; that of the result is undefined (as
    of torch's own ``grouped_mm``): mask it before it meets other rows.
    ``epilogue``: as in ``kernelseam.grouped_mm``; gradients flow to the tensors that it captures,
    too, where nothing traces the call, and are computed once.
    ``out_dtype`` may be torch's. ``implementation`` selects an implementation of the product,
    ``bwd_implementation`` one of the gradients'. Under torch.autocast a and b are converted to its
    dtype. Where torch compiles, exports or transforms the caller, ``torch.ops.kernelseam`` is
    called.
    """
    given = {"a": a, "b": b, "offs": offs}
    given |= dict(zip(INDICES, (a_indices, out_indices, out_factors), strict=True))
    options: dict[str, Any] = {
        "alpha": alpha,
        "precision": precision,
        "backend": backend,
        "implementation": implementation,
    }
    known, wants = plain(given)
    usual = not wants and bwd_implementation is None and epilogue is None
    if usual and known is not None and "a" in known and "b" in known:
        return grouped_gemm.grouped_mm(**known, out_dtype=dtype_name(out_dtype), **options)
    operands, traced = tensors(given, ("a", "b"))
    operands = autocast(operands, ("a", "b"))
    if epilogue is not None and not traced:
        check_bwd_implementation(bwd_implementation, "grouped_gemm", "a", operands)
        if reduces(epilogue):
            raise refused_reductions()
        options |= {"out_dtype": dtype_name(out_dtype)}
        own = grouped_epilogues.DIFFERENTIATED
        return own(operands, options, epilogue, bwd_implementation)
    if not traced:
        check_bwd_implementation(bwd_implementation, "grouped_gemm", "a", operands)
        if not wanted(operands, DIFFERENTIABLE):
            return grouped_gemm.grouped_mm(**operands, out_dtype=dtype_name(out_dtype), **options)
    options |= {"out_dtype": out_dtype, "bwd_implementation": bwd_implementation}
    every = tuple([operands.get(n) for n in OPERANDS])
    product: Tensor = (
        GROUPED_MM(*every, **options)
        if epilogue is None
        else multiply(grouped_epilogues.GROUPED_MM, every, epilogue, options)
    )
    return product
