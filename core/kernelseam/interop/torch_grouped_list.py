"""Products of any sizes that torch differentiates. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    implementation_name,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.grouped_list import gradients, multiply
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
    if traced:
        options["bwd_implementation"] = bwd_implementation
        return multiply(whole[:count], whole[count:], None, **options)
    check_bwd_implementation(bwd_implementation, "grouped_gemm_pointers", "a[0]", operands)
    of_8_bits = operands["a[0]"].itemsize == 1
    if wanted(operands, () if of_8_bits else tuple(given)):
        return list(_Products.apply(count, options, bwd_implementation, *whole))
    return grouped_list.grouped_mm_list(whole[:count], whole[count:], **options)


class _Products(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        options: dict[str, Any],
        bwd_implementation: str | None,
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        ctx.options = {**options, "out_dtype": None, "implementation": bwd_implementation}
        ctx.options["bwd_implementation"] = bwd_implementation
        return tuple(grouped_list.grouped_mm_list(operands[:count], operands[count:], **options))

    @staticmethod
    def backward(ctx: Any, *dcs: Tensor) -> tuple[Any, ...]:
        return (
            None,
            None,
            None,
            *gradients(
                lambda a, b: grouped_mm_list(a, b, **ctx.options),
                dcs,
                ctx.saved_tensors,
                ctx.needs_input_grad[3:],
            ),
        )
