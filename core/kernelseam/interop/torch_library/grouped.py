"""``torch.ops.kernelseam.grouped_mm``, whose gradients are products of the same kind: they
differentiate again."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.descriptors.common.options import scalars_of
from kernelseam.descriptors.gemm.options import GroupedOptions
from kernelseam.interop.torch_function import check_bwd_implementation, with_matrices
from kernelseam.interop.torch_library import flops
from kernelseam.interop.torch_library.define import (
    define,
    faked_as,
    of_rank,
    refuse_gradients,
    room,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.schemas import CHOSEN, schema_of
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any

OPERANDS = ("a", "b", "offs", "a_scales", "b_scales", "out")


def _compute(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    out: Tensor | None = None,
    *,
    out_dtype: Any = None,
    bwd_implementation: str | None = None,
    **options: Any,
) -> Tensor:
    check_bwd_implementation(bwd_implementation, "grouped_gemm", "a", {"a": a})
    with torch.no_grad():
        return grouped_mm(
            a,
            b,
            offs,
            a_scales=a_scales,
            b_scales=b_scales,
            # what follows the last group stays as it is
            out=None if out is None else room(out, True),
            out_dtype=dtype_name(out_dtype),
            **options,
        )


def _fake(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    out: Tensor | None = None,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> Tensor:
    of_rank("a", a, 2, 3)
    of_rank("b", b, 2, 3)
    if out is not None:
        return faked_as(out)
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        if a.dim() == 2 and offs is not None:
            of_rank("offs", offs, 1)
        shape.insert(0, a.shape[0] if offs is None else offs.shape[0])
    own = torch.float32 if a.itemsize == 1 else a.dtype  # as ops.gemm.result has it
    return a.new_empty(shape, dtype=out_dtype or own)


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, offs, *_ = inputs
    refuse_gradients(ctx, OPERANDS, () if a.itemsize == 1 else OPERANDS[:2])
    options = dict(keyword_only_inputs)
    for name in ("out_dtype", "scale_block", "beta", "implementation"):
        options.pop(name)
    options["implementation"] = options["bwd_implementation"]
    ctx.options = options
    ctx.save_for_backward(a, b, offs)


def _backward(ctx: Any, dc: Tensor) -> Any:
    a, b, offs = ctx.saved_tensors
    of_a, of_b, *_ = ctx.wanted
    dc = with_matrices(dc.to(a.dtype))
    da = GROUPED_MM(dc, b.mT, offs, **ctx.options) if of_a else None
    db = GROUPED_MM(a.mT, dc, offs, **ctx.options) if of_b else None
    return da, db, None, None, None, None


GROUPED_MM = define(
    "grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? a_scales=None, "
    "Tensor? b_scales=None, Tensor? out=None, *, "
    f"{schema_of(GroupedOptions(), *scalars_of(GroupedOptions))}, {CHOSEN}, "
    "str? bwd_implementation=None) -> Tensor",
    _compute,
    _fake,
    setup=_setup,
    backward=_backward,
    flops=flops.grouped,
)
