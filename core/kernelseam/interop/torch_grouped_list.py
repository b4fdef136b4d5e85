"""Products of any sizes that torch differentiates. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelseam.dtypes import DType
from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    implementation_name,
    tensors,
    wanted,
    with_matrices,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.gemm import MATMUL2D
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
    to its dtype. Where torch compiles, exports or transforms the caller, each product is a launch
    of its own.
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
        if (asked := options["out_dtype"]) is not None:
            DType.of(asked, "out_dtype")  # single products have results of 8 bits, too
        options["bwd_implementation"] = bwd_implementation
        pairs = zip(whole[:count], whole[count:], strict=True)
        return [MATMUL2D(x, y, **options) for x, y in pairs]
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
        operands, count = ctx.saved_tensors, len(dcs)
        a, b = operands[:count], operands[count:]
        dc = [with_matrices(x.to(y.dtype)) for x, y in zip(dcs, a, strict=True)]
        of = [i for i, wanted in enumerate(ctx.needs_input_grad[3:]) if wanted]
        gradients: dict[int, Tensor] = {}
        for first in range(0, len(of), grouped_list.MOST):
            some = of[first : first + grouped_list.MOST]
            made = grouped_mm_list(
                [dc[i] if i < count else a[i - count].mT for i in some],
                [b[i].mT if i < count else dc[i - count] for i in some],
                **ctx.options,
            )
            gradients |= zip(some, made, strict=True)
        return None, None, None, *(gradients.get(i) for i in range(2 * count))
