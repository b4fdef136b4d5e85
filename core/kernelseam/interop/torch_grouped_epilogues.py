"""Grouped products with an epilogue that torch differentiates: by a, b, ``out_factors``, and by the
tensors that the epilogue captures. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.epilogues import Epilogue, Gated, as_one
from kernelseam.expressions.epilogues import EpilogueExpression, traced_epilogue
from kernelseam.interop.torch_epilogues import (
    by_captured,
    by_groups,
    by_product,
)
from kernelseam.interop.torch_function import differentiable_once, uncompiled, wanted
from kernelseam.interop.torch_library.dtypes import result_dtype
from kernelseam.interop.torch_library.grouped import (
    DIFFERENTIABLE,
    INDICES,
    Rows,
    gradients,
    shape_of,
)
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any
_OPERANDS = ("a", "b", "offs", *INDICES)


def multiply(
    operands: Mapping[str, Tensor],
    options: Mapping[str, Any],
    epilogue: Epilogue,
    bwd_implementation: str | None,
) -> Tensor:
    """``options``: those of the product."""
    one = as_one(epilogue)
    expression = traced_epilogue(one.function, one.pairs)
    learnt = [x for x in expression.arrays if getattr(x, "requires_grad", False)]
    if not (torch.is_grad_enabled() and (wanted(operands, DIFFERENTIABLE) or learnt)):
        return grouped_mm(**operands, epilogue=expression, **options)
    given = (operands.get(n) for n in _OPERANDS)
    return _Epilogue.apply(options, bwd_implementation, one, expression, *given, *learnt)


uncompiled(multiply)


@differentiable_once("grouped_mm with an epilogue")
def _gradients(ctx: Any, dout: Tensor) -> Any:
    a, b, offs, of_a, of_result, factors, acc, *learnt = ctx.saved_tensors
    needs = dict(zip(_OPERANDS, ctx.needs_input_grad[4:10], strict=True))
    options, backend = ctx.options, ctx.options["backend"]
    # rows as the product counts them, whichever they are of the result
    there = Rows(a, b, offs, of_a, of_result, factors)
    acc, dout = (there.gathered(x, of_result) for x in (acc, dout))
    rows = Rows(a, b, offs, of_a, None, factors)
    da = db = dfactors = None
    if any(needs.values()):
        if offs is None:
            dc = by_product(ctx.expression, acc, dout, backend)
        else:
            dc = by_groups(ctx.expression, acc, dout, offs, backend)
        da, db, dfactors = gradients(dc, a, b, rows, needs, options)
    more: list[Tensor] = []
    if learnt:
        groups = None
        if offs is not None:
            numbers = torch.arange(len(acc), device=acc.device)
            groups = torch.searchsorted(offs, numbers, right=True).clamp(max=max(len(offs) - 1, 0))
            groups = groups[:, None]
        more = by_captured(ctx.one, rows.kept(acc), rows.kept(dout), learnt, groups)
    return None, None, None, None, da, db, None, None, None, dfactors, *more


class _Epilogue(torch.autograd.Function):  # type: ignore[misc]
    """The operation with what its epilogue is of, which gradients need."""

    @staticmethod
    def forward(
        ctx: Any,
        options: Mapping[str, Any],
        bwd_implementation: str | None,
        one: Gated,
        expression: EpilogueExpression,
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        a_indices: Tensor | None,
        out_indices: Tensor | None,
        out_factors: Tensor | None,
        *learnt: Tensor,
    ) -> Tensor:
        indices = (a_indices, out_indices, out_factors)
        given: dict[str, Any] = dict(zip(INDICES, indices, strict=True))
        if (a.dim(), b.dim()) not in ((2, 3), (3, 3)):  # refused by the operation
            return grouped_mm(a, b, offs, **given, epilogue=expression, **options)
        dtype = result_dtype(a, options["out_dtype"])
        acc = torch.empty(shape_of({"a": a, "b": b, **given}), dtype=dtype, device=a.device)
        out = grouped_mm(
            a,
            b,
            offs,
            **given,
            epilogue=expression,
            preactivation=acc,
            **options,
        )
        ways = {"implementation": bwd_implementation, "bwd_implementation": bwd_implementation}
        ctx.options = {n: options[n] for n in ("alpha", "precision", "backend")} | ways
        ctx.one, ctx.expression = one, expression
        ctx.save_for_backward(a, b, offs, *indices, acc, *learnt)
        return out

    backward = staticmethod(_gradients)
