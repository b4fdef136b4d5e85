"""The oracle of projections whose k and v are appended to pages: what the append makes of a
product, and of how far that is off."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.dtypes import DType
from kernelseam.oracle import cache, tolerances
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.formulas import Array, GemmResult


def rows(
    result: GemmResult,
    K: int,
    dtype: DType,
    between: DType,
    tables: tuple[Array, Array] | None = None,
    style: str = "",
    positions: Array | None = None,
    *,
    zero_mean: bool = True,
    flushed: bool = False,
) -> CacheRows:
    """Rows of a product [batch, head, token, column] of ``K`` terms of ``dtype``, rounded to
    ``between``; then rotated by ``tables`` at ``positions`` [batch, token], where these are given.
    ``between`` is the accumulator's dtype where nothing is rounded before the result is."""
    error = tolerances.gemm(result, K, dtype, between, zero_mean=zero_mean, flushed=flushed)
    if tables is None or positions is None:
        return replace(cache.copied(result.out), exact=False, error=error)
    rotated = cache.transformed(result.out, None, 0.0, tables, style, positions)
    moved = cache.transformed(error, None, 0.0, tables, style, positions)
    return replace(rotated, error=moved.magnitude)
