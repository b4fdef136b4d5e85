"""Derivatives of an epilogue: by what it is of, as kernels of their own, and by the tensors that it
captures, by torch's autograd. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.expressions.captures import dtype_name
from kernelseam.expressions.derivatives import slope
from kernelseam.expressions.epilogues import HALVES, EpilogueExpression, EpilogueStructure
from kernelseam.expressions.nodes import Node, Type, coordinate, make, substitute
from kernelseam.interop.torch_expression import gradients_by_tensors
from kernelseam.interop.torch_library.dtypes import dtype_name as name_of
from kernelseam.ops.gemm import bmm
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any


def check_preactivation(dtype: Any) -> None:
    """Refuse gradients of a result of 8 bits, in whose dtype the preactivation is stored: rounded
    and saturated sums are none that a derivative can be taken at. Raises InvalidValue."""
    if dtype.itemsize == 1:
        raise InvalidValue(
            "out_dtype",
            name_of(dtype),
            "must be wider than 8 bits where gradients are wanted: they start from the sums before "
            "the epilogue, which are stored in the result's dtype",
            "Call it under torch.no_grad(), or detach the operands and what the epilogue captures",
        )


def _by_sum(
    expression: EpilogueExpression, of: str, sums: list[Tensor], arriving: Tensor
) -> EpilogueExpression:
    """What arrives times the derivative by a sum, as an epilogue of nothing: a kernel of its own
    that reads the sums [results, M, columns], or [M, columns] of groups, which the forward
    stored."""
    rank, arrays = arriving.dim(), (*sums, arriving)
    first, at = len(expression.arrays), tuple(map(coordinate, ("batch", "m", "n")[-rank:]))
    loads = [
        Node("load", Type.FLOAT, at, (first + i, dtype_name(x), rank)) for i, x in enumerate(arrays)
    ]
    names = expression.structure.sums
    by = {coordinate(n, Type.FLOAT): x for n, x in zip(names, loads, strict=False)}
    root = make("mul", substitute(slope(expression.structure.value, of), by), loads[-1])
    structure = EpilogueStructure(
        root,
        "",
        expression.structure.numbers,
        (*expression.structure.arrays, *((dtype_name(x), rank) for x in arrays)),
    )
    every = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in expression.arrays)
    return EpilogueExpression(structure, expression.numbers, (*every, *arrays))


def by_sums(
    expression: EpilogueExpression,
    acc: Tensor,
    arriving: Tensor,
    result: Tensor,
    write: Callable[[EpilogueExpression, Tensor], object],
) -> None:
    """The gradient by the sums of products, into a result of acc's shape. ``write`` writes the
    result of a product of nothing with an epilogue."""
    pairs = expression.structure.pairs
    sums = _parts(acc, pairs)
    for name, to in zip(expression.structure.sums, _parts(result, pairs), strict=True):
        into = to if to.stride(-1) == 1 or to.shape[-1] <= 1 else torch.empty_like(to)
        write(_by_sum(expression, name, sums, arriving), into)
        if into is not to:  # every other column
            to.copy_(into)


def _parts(acc: Tensor, pairs: str) -> list[Tensor]:
    if not pairs:
        return [acc]
    if pairs == HALVES:
        return list(acc.chunk(2, -1))
    return [acc[..., 0::2], acc[..., 1::2]]


def by_product(
    expression: EpilogueExpression, acc: Tensor, dout: Tensor, backend: str | None
) -> Tensor:
    """The gradient by the sums of products, of acc's shape."""
    M, columns = dout.shape[-2:]
    count = math.prod(acc.shape[:-2])
    nothing = (acc.new_empty(count, M, 0), acc.new_empty(count, 0, columns))
    result = torch.empty_like(acc, memory_format=torch.contiguous_format)
    by_sums(
        expression,
        acc.reshape(count, *acc.shape[-2:]),
        dout.reshape(count, M, columns),
        result.view(count, *acc.shape[-2:]),
        lambda own, into: bmm(*nothing, out=into, epilogue=own, backend=backend),
    )
    return result


def by_groups(
    expression: EpilogueExpression, acc: Tensor, dout: Tensor, offs: Tensor, backend: str | None
) -> Tensor:
    """As ``by_product``, of rows [T, N] in groups."""
    nothing = acc.new_empty(len(acc), 0), acc.new_empty(len(offs), 0, dout.shape[-1])
    result = torch.empty_like(acc, memory_format=torch.contiguous_format)
    by_sums(
        expression,
        acc,
        dout,
        result,
        lambda own, to: grouped_mm(*nothing, offs, out=to, epilogue=own, backend=backend),
    )
    return result


def by_captured(
    expression: EpilogueExpression,
    wanted: Sequence[bool],
    acc: Tensor,
    dout: Tensor,
    batch: Tensor | None = None,
) -> list[Tensor | None]:
    """The gradients by captured tensors: of the expression, by torch's autograd. ``batch``: which
    matrix is told to it, as it broadcasts to dout; [batch…] counted where it is left out."""
    M, columns = dout.shape[-2:]
    m, n = (torch.arange(x, device=acc.device) for x in (M, columns))
    lead = dout.shape[:-2]
    if batch is None:
        batch = torch.arange(math.prod(lead), device=acc.device).reshape(*lead, 1, 1)
    wide = acc if acc.dtype is torch.float64 else acc.float()
    s = expression.structure
    at = dict(zip(s.sums, _parts(wide, s.pairs), strict=True))
    at |= {"m": m[:, None], "n": n, "batch": batch}
    return gradients_by_tensors(s.value, at, expression, wanted, dout, wide)
