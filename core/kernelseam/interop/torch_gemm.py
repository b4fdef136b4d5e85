"""Products that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at
its first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernelseam.epilogues import Epilogue
from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    implementation_name,
    plain,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library import gemm as operators
from kernelseam.interop.torch_library import gemm_epilogues
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.grouped_list import multiply as multiply_list
from kernelseam.interop.torch_library.product_epilogues import multiply
from kernelseam.ops import grouped_list


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
    ``implementation`` selects an implementation of the product, ``bwd_implementation`` one of the
    gradients'. Under torch.autocast a and b are converted to its dtype. Where torch compiles,
    exports or transforms the caller, ``torch.ops.kernelseam`` is called.

    ``epilogue``: as in ``kernelseam.bmm``; its derivative is one more launch, which reads what the
    forward stored before it, in the result's dtype. Float tensors that it captures have gradients
    too, where it is a function of torch's: torch differentiates it again for these.

    Gradients are differentiable once: under ``create_graph`` a second derivative raises
    InvalidValue. Where none are wanted, nothing is kept for them.
    """
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    options: dict[str, Any] = {"a_transposed": a_transposed, "b_transposed": b_transposed}
    options |= {"alpha": alpha, "backend": backend, "implementation": implementation}
    return _apply(operators.OF_BMM, given, options, epilogue, out_dtype, bwd_implementation)


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
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    options: dict[str, Any] = {"a_transposed": a_transposed, "b_transposed": b_transposed}
    options |= {"alpha": alpha, "backend": backend, "implementation": implementation}
    return _apply(operators.OF_MATMUL2D, given, options, epilogue, out_dtype, bwd_implementation)


def _apply(
    product: operators.Product,
    given: dict[str, Tensor | None],
    options: dict[str, Any],
    epilogue: Epilogue | None,
    out_dtype: Any,
    bwd_implementation: str | None,
) -> Tensor:
    known, wants = plain(given)
    usual = not wants and bwd_implementation is None and epilogue is None
    if usual and known is not None and "a" in known and "b" in known:
        return product.forward(**known, **options, out_dtype=dtype_name(out_dtype))
    operands, traced = tensors(given, ("a", "b"))
    operands = autocast(operands, ("a", "b"))
    whole = tuple(map(operands.get, given))
    if traced:
        options |= {"out_dtype": out_dtype, "bwd_implementation": bwd_implementation}
        if epilogue is None:
            return product.operator(*whole, **options)
        own = gemm_epilogues.WITH_EPILOGUE[product.operator]
        return multiply(own, (*whole, None, None, None), epilogue, options)
    check_bwd_implementation(bwd_implementation, "gemm", "a", operands)
    forward = {**options, "out_dtype": dtype_name(out_dtype)}
    if epilogue is not None:
        own = gemm_epilogues.DIFFERENTIATED[product.forward.__name__]
        return own(operands, forward, epilogue, bwd_implementation)
    if not wanted(operands, tuple(given)):
        return product.forward(**operands, **forward)
    forward["bwd_implementation"] = bwd_implementation
    return product.differentiated(forward, *whole, None, None, None)


def grouped_mm_list(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    alpha: float = 1,
    out_dtype: Any = None,
    precision: str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> list[Tensor]:
    """``kernelseam.grouped_mm_list`` on torch tensors, with gradients to all of them.

    The gradients of both lists are one list of products, in as few launches as its layouts allow,
    and differentiate again. ``out_dtype`` may be torch's. ``implementation`` selects an
    implementation of the products, ``bwd_implementation`` one of the gradients'. Under
    torch.autocast all are converted to its dtype. Where torch compiles, exports or transforms the
    caller, ``torch.ops.kernelseam.grouped_mm_list`` is called.
    """
    given = grouped_list.named({"a": a, "b": b})
    options: dict[str, Any] = {"alpha": alpha, "precision": precision, "backend": backend}
    options |= {"implementation": implementation, "out_dtype": dtype_name(out_dtype)}
    if not given:
        if bwd_implementation is not None:
            implementation_name("bwd_implementation", bwd_implementation)
        empty: list[Tensor] = grouped_list.grouped_mm_list([], [], **options)
        return empty
    operands, traced = tensors(given, tuple(given))
    operands = autocast(operands, tuple(given))
    count, whole = len(a), list(operands.values())
    if not traced:
        check_bwd_implementation(bwd_implementation, "grouped_gemm_pointers", "a[0]", operands)
        of_8_bits = operands["a[0]"].itemsize == 1
        if not wanted(operands, () if of_8_bits else tuple(given)):
            return grouped_list.grouped_mm_list(whole[:count], whole[count:], **options)
    options["bwd_implementation"] = bwd_implementation
    return multiply_list(whole[:count], whole[count:], **options)
