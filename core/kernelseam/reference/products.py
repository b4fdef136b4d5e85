"""Products of stacks of matrices, each so small that BLAS computes it on the calling thread.

OpenBLAS distributes a product of 2¹⁹ multiply-adds or more over threads of its own, and callers on
several threads then wait for one another. Smaller ones stay on the calling thread, whatever number
of threads BLAS may use, and are computed without packing: at 85 to 100 percent of the rate of large
ones. So the threads of a launch keep the cores busy, and those of BLAS stay as the user set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MOST = (1 << 19) - 1
"""Multiply-adds of one product."""
_NARROW = 8
"""Columns up to which OpenBLAS has a kernel for a right factor of rows, up to 1200 results."""
_COLUMNS = 64
"""Of one product: four vectors of 16."""


def product(a: Array, b: Array, out: Array) -> None:
    """out = a·b of a [..., m, k], b [..., k, n]: blocks of out, whose bits do not depend on how
    many matrices are in the stack."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    rows, columns = _steps(k, n, a.strides[-1] > a.strides[-2])
    empty = not (a.size and b.size)
    if empty or (m * k * n <= MOST and (n > _NARROW or m <= rows)):
        np.matmul(a, b, out=out)
        return
    for i, high in _runs(m, rows):
        left = a[..., i, :].reshape(*a.shape[:-2], -1, 1, high, k)
        for j, wide in _runs(n, columns):
            right = b[..., j].reshape(*b.shape[:-1], -1, wide)
            to = out[..., i, j].reshape(*out.shape[:-2], -1, high, right.shape[-2], wide)
            np.matmul(left, right.swapaxes(-2, -3)[..., None, :, :, :], out=to.swapaxes(-2, -3))


def visible_product(a: Array, b: Array, hidden: Array, out: Array) -> None:
    """out = a·b, where a row of a skips the rows of b that are hidden from it, by a mask whose
    shape a's covers. a is 0 there, but 0·NaN is NaN."""
    finite: Any = np.isfinite(b).all(axis=-1)
    product(a, np.where(finite[..., None], b, 0), out)
    seen: Array = ~np.broadcast_to(hidden, a.shape)
    for m in np.flatnonzero(~finite.reshape(-1, finite.shape[-1]).all(axis=0)):
        shown = seen[..., m] & ~finite[..., m, None]
        term = a[..., m, None] * b[..., m, None, :]
        np.add(out, term, out=out, where=shown[..., None])


@lru_cache
def _steps(k: int, n: int, transposed: bool) -> tuple[int, int]:
    """Rows and columns of one product of k summands: powers of two, which divide most extents; less
    than 32 rows of a transposed left factor are a multiple of six, which OpenBLAS computes at a
    time there. Other numbers take up to a third more time."""
    if n <= _NARROW:
        return _power(min(1200, MOST // max(k, 1)) // max(n, 1)), max(n, 1)
    columns = _COLUMNS if 4 * _COLUMNS * k <= MOST else _COLUMNS // 2
    rows = MOST // max(columns * k, 1)
    if transposed and 6 <= rows < 32:
        return rows // 6 * 6, columns
    return min(_power(rows), 32 if transposed else 64), columns


def _power(n: int) -> int:
    """The largest power of two up to n, at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


def _runs(n: int, step: int) -> Iterator[tuple[slice, int]]:
    """The range of all whole runs of ``step``, then that of the rest, each with a run's length."""
    whole = n - n % step
    if whole:
        yield slice(0, whole), step
    if whole < n:
        yield slice(whole, n), n - whole
