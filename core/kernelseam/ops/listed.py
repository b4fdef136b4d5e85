"""Lists of products as arrays of numbers: what a launch has in common, its problem and its table
come from one pass over all matrices, not from a descriptor over views of them.

Whatever is refused, and results that may share memory, are left to the descriptor, which raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.validation import WIDE
from kernelseam.descriptors.gemm.grouped_pointers_problem import (
    GroupedGemmPointersProblem,
    GroupedGemmPointersSpec,
)
from kernelseam.descriptors.gemm.problem import GemmSpec
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.elements import INT32

Numbers = npt.NDArray[np.int64]
ROWS, COLUMNS, ROW_STEP, COLUMN_STEP = range(4)
_TRANSPOSED = [COLUMNS, ROWS, COLUMN_STEP, ROW_STEP]


@dataclass(frozen=True, eq=False)
class Listed:
    """One launch."""

    problem: GroupedGemmPointersProblem
    addresses: Numbers
    """[3, groups]: A's, B's and C's."""


class Lists:
    """Lists of products of these dtypes."""

    def __init__(self, dtypes: Sequence[tuple[DType, DType]], precision: str | None) -> None:
        """``dtypes``: of A and B, and of C, of each product."""
        self._kinds = list(dict.fromkeys(dtypes))
        self._of_kind = 8 * np.array([self._kinds.index(x) for x in dtypes], np.int64)
        self._sizes = np.array([(a.itemsize, a.itemsize, c.itemsize) for a, c in dtypes]).T
        self._precision = precision
        self._specs: dict[tuple[int, ...], GroupedGemmPointersSpec] = {}

    def launches(
        self, addresses: Numbers, layouts: Numbers, alpha: float, beta: float, is_new: bool = False
    ) -> list[Listed] | None:
        """``addresses`` [3, products] of a, b and the results, ``layouts`` [3, products, 4], of
        each rows, columns and their strides. ``is_new``: results share memory with nothing. None
        where the descriptor must look at them."""
        at, x, sizes = addresses, layouts, self._sizes
        strided, upright = _apart(x, ROWS, COLUMNS), _apart(x, COLUMNS, ROWS)
        if (strided & upright).any():
            return None
        if (exchanged := strided[2]).any():  # Cᵀ = Bᵀ·Aᵀ
            at, x, strided = at.copy(), x.copy(), strided.copy()
            at[:, exchanged] = addresses[[1, 0, 2]][:, exchanged]
            x[:, exchanged] = layouts[[1, 0, 2]][:, exchanged][..., _TRANSPOSED]
            strided[:, exchanged] = upright[[1, 0, 2]][:, exchanged]
        m, n, k = x[2, :, ROWS], x[2, :, COLUMNS], x[0, :, COLUMNS]
        if not ((x[0, :, ROWS] == m) & (x[1, :, ROWS] == k) & (x[1, :, COLUMNS] == n)).all():
            return None
        steps = x[:, :, ROW_STEP:]
        even = (steps == 1) | (steps * sizes[:, :, None] % WIDE == 0)
        wide = (even.all(2) & (at % WIDE == 0)).all(0)
        memory = np.where(strided[:, :, None], x[..., _TRANSPOSED], x)
        rows, columns = memory[..., ROWS], memory[..., COLUMNS]
        walk = np.where(rows > 1, memory[..., ROW_STEP], np.maximum(columns, 1))
        if walk.max(initial=0) >= INT32 or x.max(initial=0) >= INT32:
            return None
        if ((rows[2] > 1) & (walk[2] < columns[2])).any():
            return None
        live = (m > 0) & (n > 0)
        read = live & (k > 0) & (alpha != 0)
        used = np.stack((read, read, live)) & (columns > 0) & (rows > 0)
        if (used & (at == 0)).any() or (at % sizes != 0)[used].any():
            return None
        if not (is_new or _are_apart(at, ((rows - 1) * walk + columns) * sizes, used)):
            return None
        vector = ~used | ((at % WIDE == 0) & ((rows <= 1) | (walk * sizes % WIDE == 0)))
        table = np.stack((m, n, k, *walk), axis=1)
        code = self._of_kind + 4 * strided[0] + 2 * strided[1] + wide
        found = []
        for c in dict.fromkeys(code[live].tolist()):
            chosen: Any = live & (code == c)
            if chosen.all():
                chosen = slice(None)
            spec = self._spec((c, *vector[:, chosen].all(1).tolist()))
            problem = GroupedGemmPointersProblem.of(spec, table[chosen], alpha, beta)
            found.append(Listed(problem, at[:, chosen]))
        return found

    def _spec(self, key: tuple[int, ...]) -> GroupedGemmPointersSpec:
        """By what its products have in common, and whether rows of A, B and C are wide."""
        if key not in self._specs:
            code, *wide = key
            dtype, dtype_c = self._kinds[code >> 3]
            a, b, c = (
                WIDE if whole else kind.itemsize
                for whole, kind in zip(wide, (dtype, dtype, dtype_c), strict=True)
            )
            product = GemmSpec(
                dtype,
                dtype_c,
                dtype.accumulator,
                bool(code & 4),
                bool(code & 2),
                "pointers",
                precision=precision_of(self._precision, dtype, "A and B"),
                vector_a=a,
                vector_b=b,
                vector_c=c,
            )
            self._specs[key] = GroupedGemmPointersSpec(product)
        return self._specs[key]


def _apart(x: Numbers, rows: int, columns: int) -> npt.NDArray[np.bool_]:
    """Whether elements along an axis of matrices are apart, as ``products.is_strided`` has it."""
    apart: npt.NDArray[np.bool_] = (
        (x[..., columns + 2] != 1) & (x[..., columns] > 1) & (x[..., rows] > 0)
    )
    return apart


def _are_apart(at: Numbers, size: Numbers, used: npt.NDArray[np.bool_]) -> bool:
    """Whether the bytes of each result are nobody else's."""
    begins, ends = np.sort(at[used]), np.sort((at + size)[used])
    results = used[2]
    begin, end = at[2][results], (at + size)[2][results]
    meeting = begins.searchsorted(end) - ends.searchsorted(begin, side="right")
    return bool((meeting == 1).all())
