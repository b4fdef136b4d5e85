"""``torch.ops.kernelseam.grouped_mm_epilogue``, with its gradients."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.interop.torch_library import flops, grouped
from kernelseam.interop.torch_library.grouped import DIFFERENTIABLE, INDICES, Rows
from kernelseam.interop.torch_library.product_epilogues import (
    Derivative,
    Given,
    Product,
    differentiated,
    with_epilogue,
)
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any


def _gradients(ctx: Any, saved: Given, derivative: Derivative) -> dict[str, Tensor | None]:
    a, b, offs, of_a, of_result, factors = (saved[n] for n in _SAVED)
    # rows as the product counts them, whichever they are of the result
    there = Rows(a, b, offs, of_a, of_result, factors)
    dc = derivative(lambda x: there.gathered(x, of_result), offs)
    assert dc is not None
    rows = Rows(a, b, offs, of_a, None, factors)
    wanted = {n: n in ctx.needed for n in DIFFERENTIABLE}
    made = grouped.gradients(dc, a, b, rows, wanted, ctx.options)
    return dict(zip(DIFFERENTIABLE, made, strict=True))


def _counted(saved: Given, acc: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    rows, offs = Rows(*(saved[n] for n in _SAVED)), saved["offs"]
    acc, dout = (rows.kept(rows.gathered(x, rows.of_result)) for x in (acc, dout))
    if offs is None:
        return acc, dout
    numbers = torch.arange(len(acc), device=acc.device)
    groups = torch.searchsorted(offs, numbers, right=True).clamp(max=max(len(offs) - 1, 0))
    return acc, dout, groups[:, None]


_SAVED = ("a", "b", "offs", *INDICES)
_PRODUCT = Product(
    "grouped_mm",
    "grouped_gemm",
    grouped.OPERANDS,
    grouped.OPERAND_SCHEMA,
    grouped.OPTION_SCHEMA,
    grouped_mm,
    lambda given, options: grouped.shape_of(given),
    lambda a: () if a.itemsize == 1 else DIFFERENTIABLE,
    _SAVED,
    ("alpha", "precision", "backend", "bwd_implementation"),
    _gradients,
    flops.grouped,
    writes_all=False,
    counted=_counted,
)
GROUPED_MM = with_epilogue(_PRODUCT)
DIFFERENTIATED = differentiated(_PRODUCT, "grouped_mm with an epilogue")
"""Where nothing traces the call."""
