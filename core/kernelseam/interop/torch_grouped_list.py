"""Products of any sizes that torch differentiates. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    implementation_name,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.grouped_list import multiply
from kernelseam.ops import grouped_list


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
    and differentiate again. ``out_dtype`` may be torch's. ``implementation`` names a way of the
    products, ``bwd_implementation`` one of the gradients'. Under torch.autocast all are converted
    to its dtype. Where torch compiles, exports or transforms the caller,
    ``torch.ops.kernelseam.grouped_mm_list`` is called.
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
    return multiply(whole[:count], whole[count:], **options)
