"""Reductions in a GEMM's epilogue: partial results that its tiles write (reductions.h), and the
kernel that combines them (reduce.h)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from kernelseam.contract import ArchRow, Device, Launch, Launches
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.expressions.epilogues import HALVES
from kernelseam.expressions.reductions import MAXIMUM, Reduction, reduction
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.row_kernels import RowTile, SmallKernel
from kernelseam.kernels.config import Constants
from kernelseam.kernels.elements import INT32, divide_up
from kernelseam.kernels.gemm.tile import GemmTile
from kernelseam.kernels.signature import Structure

_WARPS, _WIDEST_WARP = 8, 64
MANY, SOME, FEW = 128, 32, 8
"""Elements of the result that a block of reduce.h computes where their partial results are
contiguous: MANY for elements of at most FEW partial results, else SOME."""
_CHUNK = 32
"""Partial results that a first launch combines into one, where there are many."""
_ALIGNMENT = 16
_NUMBERS = ("matrix", "row", "column")


def part_pointers(spec: GemmSpec) -> tuple[str, ...]:
    """The GEMM's pointer parameters for partial results."""
    return tuple(f"parts_{i}" for i in range(len(spec.reductions)))


def parts_structure(spec: GemmSpec) -> Structure:
    """The GEMM's parameter for partial results."""
    names = part_pointers(spec)
    counts = ("row_strips", "column_strips")
    members = (*((n, "pointer") for n in names), *((n, "i32") for n in counts))
    return Structure(members, (*(f"parts[{i}]" for i in range(len(names))), *counts))


@dataclass(frozen=True)
class Strips:
    """Blocks of ``high``×``wide`` elements, ``rows``×``columns`` of them in each result matrix. A
    partial result covers a block, or one of its rows or columns."""

    high: int
    wide: int
    rows: int
    columns: int


def part_values(strips: Strips) -> dict[str, int]:
    """The argument's values."""
    return {"row_strips": strips.rows, "column_strips": strips.columns}


def numbers_structure(spec: GemmSpec) -> Structure:
    """The parameter of a GEMM that combines its own partial results."""
    kinds = (("numbers", "pointer"), *((n, "i64") for n in _NUMBERS), ("matrices", "i32"))
    each = [(name, i, kind) for name, kind in kinds for i in range(len(spec.reductions))]
    members = tuple((f"reduced_{name}_{i}", kind) for name, i, kind in each)
    return Structure(members, tuple(f"{name}[{i}]" for name, i, _ in each))


def number_values(p: GemmProblem, strips: Strips) -> dict[str, int]:
    """The argument's values."""
    values = dict[str, int]()
    for i, (r, one) in enumerate(zip(p.spec.reductions, reduce_problems(p, strips), strict=True)):
        strides = _ordered(one.out_strides, _axes(r))
        values |= {f"reduced_{n}_{i}": x for n, x in zip(_NUMBERS, strides, strict=True)}
        values[f"reduced_matrices_{i}"] = one.of[0]
    return values


def number_operands(spec: GemmSpec) -> dict[str, str]:
    """Pointer members of that parameter → the operands they point to."""
    return {f"reduced_numbers_{i}": reduction(i) for i in range(len(spec.reductions))}


def warp_block(spec: GemmSpec, tile: GemmTile) -> tuple[int, int]:
    """Rows and columns of the result that one warp computes of a tile."""
    columns = tile.bn // tile.warps_n
    return tile.bm // tile.warps_m, columns // 2 if spec.pairs else columns


def strips_of(p: GemmProblem, tile: GemmTile) -> Strips:
    """The blocks of a shared kernel: one for each warp of each tile."""
    rows, columns = divide_up(p.M, tile.bm), divide_up(p.N, tile.bn)
    return Strips(*warp_block(p.spec, tile), rows * tile.warps_m, columns * tile.warps_n)


def takes_reductions(spec: GemmSpec, tile: GemmTile) -> bool:
    """Whether a tile of a shared kernel supports the spec's reductions: its warps' blocks fit and
    it has registers left."""
    if spec.reductions and spec.pairs == HALVES and not tile.reduces_halves:
        return False
    return fits_strips(spec, *warp_block(spec, tile))


def fits_strips(spec: GemmSpec, high: int, wide: int) -> bool:
    """Whether each reduction covers a multiple of the block's rows and columns, or single ones."""
    return all(
        _divides(1 if r.rows == 1 else high, r.rows)
        and _divides(1 if r.columns == 1 and r.rows != 1 else wide, r.columns)
        for r in spec.reductions
    )


def _divides(n: int, size: int) -> bool:
    return size % n == 0


@dataclass(frozen=True)
class ReduceSpec:
    """The compile-time options of reduce.h."""

    maximum: bool
    elements: int
    """Neighbouring elements of the result that a block computes."""


@dataclass(frozen=True)
class ReduceProblem:
    """A sum or a maximum of partial results: extents and strides of both along three axes, in
    elements; along the last one the partial results are contiguous. ``of``: how many partial
    results an element has along each axis; the last element has those that remain."""

    spec: ReduceSpec
    parts: tuple[int, int, int]
    part_strides: tuple[int, int, int]
    of: tuple[int, int, int]
    out: tuple[int, int, int]
    out_strides: tuple[int, int, int]

    @property
    def bytes_moved(self) -> int:
        return 4 * (math.prod(self.parts) + math.prod(self.out))


def reduce_problems(p: GemmProblem, strips: Strips) -> tuple[ReduceProblem, ...]:
    """The reductions of a GEMM, in order."""
    return tuple(
        _reduce_problem(p, strips, r, shape, strides)
        for r, shape, strides in zip(
            p.spec.reductions, p.reduction_shapes, p.reduction_strides, strict=True
        )
    )


def _reduce_problem(
    p: GemmProblem, strips: Strips, r: Reduction, shape: tuple[int, ...], strides: tuple[int, ...]
) -> ReduceProblem:
    high, wide = strips.high, strips.wide
    by_row, by_column = r.rows == 1, r.columns == 1 and r.rows != 1
    rows = strips.rows * (high if by_row else 1)
    columns = strips.columns * (wide if by_column else 1)
    of_rows = 1 if by_row else r.rows // high if r.rows else rows
    of_columns = 1 if by_column else r.columns // wide if r.columns else columns
    extents, steps = iter(shape), iter(strides)
    there = (r.by_matrix, r.rows, r.columns)
    axes = _axes(r)
    matrices = 1 if r.by_matrix else p.results
    parts, of = (p.results, rows, columns), (matrices, of_rows, of_columns)
    out = [next(extents) if x else 1 for x in there]
    out_strides = [next(steps) if x else 0 for x in there]
    few = math.prod(of) <= FEW
    return ReduceProblem(
        ReduceSpec(
            r.operation == MAXIMUM, 1 if not (by_row or by_column) else MANY if few else SOME
        ),
        _ordered(parts, axes),
        (rows * columns, rows if by_row else columns, 1),
        _ordered(of, axes),
        _ordered(out, axes),
        _ordered(out_strides, axes),
    )


def _axes(r: Reduction) -> tuple[int, int, int]:
    """The axes' order, with the one along which partial results are contiguous last."""
    return (0, 2, 1) if r.rows == 1 else (0, 1, 2)


def _ordered(x: Sequence[int], axes: tuple[int, int, int]) -> tuple[int, int, int]:
    first, second, third = (x[axis] for axis in axes)
    return first, second, third


def refuse_parts(p: GemmProblem, strips: Iterable[Strips]) -> str | None:
    """The reason if an element has too many partial results for any of ``strips``, else None."""
    counts = (math.prod(one.of) for s in strips for one in reduce_problems(p, s))
    most = max(counts, default=0)
    return f"a sum or a maximum is of {most} parts, 2^31 or more" if most >= INT32 else None


def part_offsets(p: GemmProblem, strips: Strips) -> tuple[dict[str, int], int]:
    """(pointer parameter → offset in the workspace, bytes of the workspace)."""
    sizes = (_bytes(one.parts) for one in reduce_problems(p, strips))
    *offsets, end = accumulate(sizes, initial=0)
    return dict(zip(part_pointers(p.spec), offsets, strict=True)), end


def _bytes(extents: tuple[int, int, int]) -> int:
    return divide_up(4 * math.prod(extents), _ALIGNMENT) * _ALIGNMENT


def reduce_launches(p: GemmProblem, strips: Strips) -> tuple[dict[str, int], list[Launch], int]:
    """(the offsets of ``part_offsets``, the launches that combine the partial results, bytes of the
    workspace)."""
    launches, tile = [], RowTile(_WARPS)
    offsets, end = part_offsets(p, strips)
    for i, (at, one) in enumerate(zip(offsets.values(), reduce_problems(p, strips), strict=True)):
        if (first := _first_step(one)) is not None:
            launches.append(Launch(REDUCE, first, tile, {"parts": at, "out": end}))
            at, one, end = end, _last_step(one, first), end + _bytes(first.out)
        launches.append(Launch(REDUCE, one, tile, {"parts": at}, {"out": reduction(i)}))
    return offsets, launches, end


def reducing(
    kernel: Any, p: GemmProblem, tile: Any, strips: Strips, adds_up: bool = False
) -> Launches:
    """The launches of a GEMM with reductions. With ``adds_up`` it is one, which combines its own
    partial results; the workspace must then be 0 before, and is 0 after."""
    if adds_up:
        offsets, size = part_offsets(p, strips)
        own = Launch(kernel, p, tile, offsets, number_operands(p.spec))
        return Launches((own,), size, zeroed_bytes=size)
    offsets, others, size = reduce_launches(p, strips)
    return Launches((Launch(kernel, p, tile, offsets), *others), size)


def _first_step(p: ReduceProblem) -> ReduceProblem | None:
    """A first launch where elements have so many partial results that few blocks would read them
    serially: it combines ``_CHUNK`` along the second axis, and all along the third, into one for
    the second launch. None where one launch does."""
    matrices, rows, columns = p.parts
    if p.of[1] < rows or rows <= _CHUNK or math.prod(p.of) <= _CHUNK * _CHUNK // 2:
        return None
    out = (matrices, divide_up(rows, _CHUNK), divide_up(columns, p.of[2]))
    return ReduceProblem(
        p.spec, p.parts, p.part_strides, (1, _CHUNK, p.of[2]), out, (out[1] * out[2], out[2], 1)
    )


def _last_step(p: ReduceProblem, first: ReduceProblem) -> ReduceProblem:
    of = (p.of[0], first.out[1], 1)
    return replace(p, parts=first.out, part_strides=first.out_strides, of=of)


class GemmReduce(SmallKernel):
    """Combines partial results: a block for some neighbouring elements, or for one."""

    entry, source = "gemm_reduce", "gemm/reduce.h"
    early = True
    pointer_names = ("parts", "out")
    stride_names = (
        *("parts_matrix", "parts_row", "parts_column", "out_matrix", "out_row", "out_column"),
        "total",
    )
    int_names = (
        *("rows", "columns", "of_matrices", "of_rows", "of_columns", "part_rows", "part_columns"),
    )
    shared = 4 * _WARPS * _WIDEST_WARP

    def constants(self, spec: ReduceSpec, tile: RowTile, row: ArchRow) -> Constants:
        return {"MAXIMUM": spec.maximum, "ELEMENTS": spec.elements, "WARPS": tile.warps}

    def tiles(self, spec: ReduceSpec, row: ArchRow) -> tuple[RowTile, ...]:
        return (RowTile(_WARPS),)

    def grid(self, problem: ReduceProblem, tile: RowTile, device: Device) -> int:
        return divide_up(math.prod(problem.out), problem.spec.elements)

    def values(
        self, problem: ReduceProblem, tile: RowTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        return self._values(
            (*p.part_strides, *p.out_strides, math.prod(p.out)),
            (*p.out[1:], *p.of, *p.parts[1:]),
        )


REDUCE = GemmReduce()
