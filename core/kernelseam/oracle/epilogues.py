"""What users' epilogues make of sums, as the oracle takes them: the functions themselves, called in
float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.oracle.formulas import Array, Floats
from kernelseam.oracle.tolerances import smallest
from kernelseam.oracle.user_functions import Function, called

_FUNCTION = 16.0
"""Roundings of float32 that a function may cost, of its result and of what it is of."""


@dataclass(frozen=True)
class Reduction:
    """Sums, or largest absolute values, of ``function``, which is as an epilogue's, over blocks of
    so many rows and columns (0: all), of each matrix or of all."""

    function: Function
    is_maximum: bool
    rows: int
    columns: int
    by_matrix: bool

    def of(self, x: Floats) -> Floats:
        """Of elements [results, M, N]."""
        blocks = list(zip((self.rows, self.columns), x.shape[1:], strict=True))
        sizes = [n or max(extent, 1) for n, extent in blocks]
        missing = [-extent % n if n else int(extent == 0) for n, extent in blocks]
        x = np.abs(x) if self.is_maximum else x
        x = np.pad(x, ((0, 0), *((0, n) for n in missing)))
        counts = [extent // n for n, extent in zip(sizes, x.shape[1:], strict=True)]
        x = x.reshape(len(x), counts[0], sizes[0], counts[1], sizes[1])
        axes = (2, 4) if self.by_matrix else (0, 2, 4)
        result: Floats = x.max(axes, initial=0.0) if self.is_maximum else x.sum(axes)
        return result


@dataclass(frozen=True)
class Epilogue:
    """``function(acc, m, n, batch)``; of ``pairs`` ("halves" or "interleaved") of columns
    ``function(gate, up, m, n, batch)``; and what is reduced beside."""

    function: Function
    pairs: str = ""
    reductions: tuple[Reduction, ...] = ()

    def parts(self, sums: Floats) -> tuple[Floats, ...]:
        """The function's first arguments, of sums [rows, N]."""
        if not self.pairs:
            return (sums,)
        if self.pairs == "interleaved":
            return sums[..., 0::2], sums[..., 1::2]
        half = sums.shape[-1] // 2
        return sums[..., :half], sums[..., half:]

    def applied(
        self,
        sums: Floats,
        tolerance: Floats,
        at: tuple[Array, Array],
        dtype: DType,
        flushed: bool,
    ) -> tuple[Floats, Floats]:
        """The result and its bound, in a result of ``dtype``, where sums [rows, N] are known within
        ``tolerance``. ``at``: of each row its number and its matrix'."""
        parts, apart = self.parts(sums), self.parts(tolerance)
        m, batch = (x[:, None] for x in at)
        n = np.arange(parts[0].shape[-1])

        def of(*x: Floats) -> Floats:
            y = called(self.function, *x, m, n, batch)
            return np.broadcast_to(np.asarray(y, np.float64), parts[0].shape)

        with np.errstate(all="ignore"):
            result = of(*parts)
            apart = tuple(np.where(np.isfinite(x), t, 0) for x, t in zip(parts, apart, strict=True))
            bound = np.zeros(result.shape)
            for signs in itertools.product((1, -1), repeat=len(parts)):
                moved = (x + s * t for x, s, t in zip(parts, signs, apart, strict=True))
                bound = np.fmax(bound, np.abs(of(*moved) - result))
            size = np.abs(result) + np.prod([1 + np.abs(x) for x in parts], axis=0) - 1
            bound += _FUNCTION * DType.float32.unit_roundoff * size
            bound += 2 * dtype.unit_roundoff * np.abs(result) + smallest(dtype, flushed)
        return result, bound

    def reduced(
        self,
        sums: Floats,
        tolerance: Floats,
        at: tuple[Array, Array],
        extents: tuple[int, int],
        acc: DType,
        flushed: bool,
    ) -> Iterator[tuple[Floats, Floats]]:
        """Of each reduction the result and its bound, where sums [rows, N] are all of a result of
        ``extents``, (matrices, rows of each)."""
        for one in self.reductions:
            own = replace(self, function=one.function)
            element, apart = own.applied(sums, tolerance, at, acc, flushed)
            element, apart = (x.reshape(*extents, x.shape[-1]) for x in (element, apart))
            with np.errstate(all="ignore"):
                result, bound = one.of(element), one.of(apart)
                if not one.is_maximum:
                    size = one.of(np.abs(element))
                    terms = element.size // max(result.size, 1)
                    bound = bound + (terms + 1) * acc.unit_roundoff * size
            yield result, bound
