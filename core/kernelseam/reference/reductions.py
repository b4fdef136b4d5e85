"""Sums and maxima of an epilogue on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.expressions.reductions import MAXIMUM, Reduction, reduction
from kernelseam.reference.implementation import operand_arrays

Array = npt.NDArray[Any]
_Place = tuple[int, int, int]
"""(matrix, row, column) of a block, for the order in which parts are added."""


def reduction_arrays(problem: GemmProblem, pointers: Mapping[str, int]) -> list[Array]:
    """What an epilogue's sums and maxima are written to."""
    names = list(map(reduction, range(len(problem.spec.reductions))))
    arrays = operand_arrays([r for r in problem.operands if r.name in names], pointers)
    return [arrays[n] for n in names]


class Reductions:
    """What the blocks of one launch contribute, in any order; added in one order, in float64, which
    does not depend on the threads."""

    def __init__(self, problem: GemmProblem, arrays: Sequence[Array]) -> None:
        self.problem = problem
        self._arrays = arrays
        self._parts: list[list[tuple[_Place, Array, Array]]] = [[] for _ in arrays]

    def add(self, index: int, value: Array, numbers: Array, rows: slice, columns: slice) -> None:
        """What a reduction is of, for a block [batch, group, head, row, column] of C's of these
        numbers. Of all matrices, those of the block become one part."""
        one = self.problem.spec.reductions[index]
        part = np.abs(value) if one.operation == MAXIMUM else value
        for axis, of, size in ((-2, rows, one.rows), (-1, columns, one.columns)):
            part = _reduced(one, part, axis, of, size)
        place = (int(numbers.flat[0]), rows.start, columns.start)
        part, numbers = part.reshape(-1, *part.shape[-2:]), numbers.reshape(-1)
        if not one.by_matrix:
            part, numbers = _reduced(one, part, 0, slice(0, len(part)), 0), np.zeros(1, int)
        self._parts[index].append((place, numbers, part))

    def write(self) -> None:
        """Combine the parts."""
        p = self.problem
        for one, out, parts in zip(p.spec.reductions, self._arrays, self._parts, strict=True):
            matrices = p.results if one.by_matrix else 1
            extents = [
                -(-n // s) if s else 1 for n, s in ((p.M, one.rows), (p.c_columns, one.columns))
            ]
            whole = np.zeros((matrices, *extents))
            with np.errstate(all="ignore"):
                for (_, row, column), numbers, part in sorted(parts, key=lambda x: x[0]):
                    row, column = row // (one.rows or p.M), column // (one.columns or p.c_columns)
                    high, wide = part.shape[1:]
                    at = (numbers, slice(row, row + high), slice(column, column + wide))
                    whole[at] = _operation(one)(whole[at], part)
                out[...] = whole.reshape(out.shape)


def _operation(one: Reduction) -> Any:
    return np.maximum if one.operation == MAXIMUM else np.add


def _reduced(one: Reduction, x: Array, axis: int, of: slice, size: int) -> Array:
    """Of blocks of ``size`` along an axis, which has the indices ``of``; 0: of all."""
    if size == 1:
        return x
    wide = {} if one.operation == MAXIMUM else {"dtype": np.float64}
    first = 0 if size == 0 else of.start - of.start % size
    starts = np.maximum(np.arange(first, of.stop, size or of.stop) - of.start, 0)
    result: Array = _operation(one).reduceat(x, starts, axis=axis, **wide)
    return result
