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
_COLUMNS = 64
"""Of one product: four vectors of 16. A sum of more numbers of k leaves room for half."""


def product(a: Array, b: Array, out: Array) -> None:
    """out = a·b of a [..., m, k], b [..., k, n]: blocks of out, whose bits do not depend on how
    many matrices are in the stack."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    if m * k * n <= MOST:
        np.matmul(a, b, out=out)
        return
    rows, columns = _steps(k, a.strides[-1] > a.strides[-2])
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
def _steps(k: int, transposed: bool) -> tuple[int, int]:
    """Rows and columns of one product of k summands. OpenBLAS computes six rows at a time where the
    left factor is transposed, else four or a multiple; others take up to twice the time."""
    columns = _COLUMNS if 8 * _COLUMNS * k <= MOST else _COLUMNS // 2
    most, unit = (24, 6) if transposed else (32, 4)
    rows = min(MOST // (columns * k), most)
    return max(rows - rows % unit, min(rows, unit), 1), columns


def _runs(n: int, step: int) -> Iterator[tuple[slice, int]]:
    """The range of all whole runs of ``step``, then that of the rest, each with a run's length."""
    whole = n - n % step
    if whole:
        yield slice(0, whole), step
    if whole < n:
        yield slice(whole, n), n - whole
