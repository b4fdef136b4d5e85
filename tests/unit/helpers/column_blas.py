"""What a BLAS that stores columns computes, on host memory and in float64: the vendors' libraries in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelseam.contract import host_array
from kernelseam.dtypes import DType

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Columns:
    """Matrices as such a library is told of them: ``lead`` elements from column to column, ``stride`` from matrix to
    matrix. Where the stride is None, ``pointer`` is that of a list of addresses."""

    pointer: int
    dtype: DType
    lead: int
    stride: int | None
    transposed: bool = False

    def matrix(self, i: int, rows: int, columns: int) -> Array:
        """Matrix i, as it lies in memory; of ``transposed`` ones the rows and columns are those after it."""
        if self.transposed:
            rows, columns = columns, rows
        if self.stride is None:
            start = int(host_array(self.pointer, (i + 1,), (1,), DType.float64).view(np.uint64)[i])
        else:
            start = self.pointer + i * self.stride * self.dtype.itemsize
        assert self.lead >= max(rows, 1), "columns must not overlap"
        found = host_array(start, (rows, columns), (1, self.lead), self.dtype)
        return found.T if self.transposed else found


def multiply(
    m: int, n: int, k: int, count: int, first: Columns, second: Columns, result: Columns, alpha: float, beta: float,
    added: Columns | None = None, bias: Columns | None = None,
) -> None:
    """result[m×n] = alpha·op(first)·op(second) + beta·added + bias, by rows. ``added`` is the result if None."""
    for i in range(count):
        out = result.matrix(i, m, n)
        x = alpha * (first.matrix(i, m, k).astype(np.float64) @ second.matrix(i, k, n).astype(np.float64))
        if beta != 0:
            x += beta * (added or result).matrix(i, m, n).astype(np.float64)
        if bias is not None:
            x += bias.matrix(i, m, 1).astype(np.float64)
        out[...] = x
