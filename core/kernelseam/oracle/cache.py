"""The oracle of paged caches: what a token's rows become, in float64, and how far from it results
may be."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kernelseam.dtypes import LARGEST, DType
from kernelseam.frozen import dataclass
from kernelseam.oracle import check, tolerances
from kernelseam.oracle.formulas import Array, Floats
from kernelseam.oracle.rotary import rotate

_CONSTANT = 8.0


@dataclass(frozen=True)
class CacheRows:
    """Rows [batch, head, token, column] of one result, and the magnitudes that they are sums of."""

    value: Floats
    magnitude: Floats
    exact: bool = False
    """Whether they are copied."""
    terms: int = 1
    """Squares that a norm sums up."""
    error: Floats | float = 0.0
    """How far the rows may be off before they are rounded to the result's dtype, beside what is
    computed from them here."""


def copied(x: Array) -> CacheRows:
    """Rows as they are."""
    wide = x.astype(np.float64)
    return CacheRows(wide, np.abs(wide), True)


def transformed(
    x: Array,
    weight: Array | None,
    eps: float,
    tables: tuple[Array, Array] | None,
    style: str,
    positions: Array,
) -> CacheRows:
    """RMS norm over columns, then rotation by the rows of cosines and sines at ``positions``
    [batch, token], as far as they are given."""
    y = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if weight is not None:
            y = y / np.sqrt((y**2).mean(axis=3, keepdims=True) + eps) * weight.astype(np.float64)
        size = np.abs(y)
        if tables is not None:
            rotate(y, size, tables, style, positions)
    return CacheRows(y, size, terms=1 if weight is None else x.shape[3])


def verdict(
    expected: Mapping[str, CacheRows],
    results: Mapping[str, Array],
    scales: Mapping[str, Array],
    accumulator: DType,
    written: Mapping[str, Array],
    flushed: bool,
) -> check.Verdict:
    """Results by name compared with ``expected``. ``scales``: what rows of 8 bits are multiplied
    by, [batch, head, token] or repeating to it; ``written``: those of them that are results."""
    parts = {}
    with np.errstate(all="ignore"):
        for name, rows in expected.items():
            dtype = DType.of(results[name].dtype, fp8=True)
            actual = results[name].astype(np.float64)
            scale = np.asarray(scales.get(name, 1.0), np.float64)
            scale = scale if scale.ndim == 0 else scale[..., None]
            unit = accumulator.unit_roundoff
            spread = _CONSTANT * unit * math.sqrt(rows.terms) * rows.magnitude + rows.error
            value = rows.value
            if dtype.is_fp8 and not rows.exact:
                bound = LARGEST[dtype] * scale
                value = np.clip(value, -bound, bound)
                rounding = dtype.unit_roundoff * (np.abs(value) + spread) + 4 * unit * np.abs(value)
                actual = actual * scale
                tolerance = rounding + spread + dtype.smallest_subnormal / 2 * scale
            elif rows.exact:
                tolerance = np.zeros_like(value)
            else:
                least = tolerances.smallest(dtype, flushed)
                tolerance = 2 * dtype.unit_roundoff * np.abs(value) + spread + least
            parts[name] = actual, value, np.broadcast_to(tolerance, value.shape)
            if name in written:
                most = np.fmax.reduce(np.abs(rows.value), axis=3, initial=0)
                ideal = np.fmax(most / LARGEST[dtype], 2.0**-120)
                spread = np.broadcast_to(spread, value.shape)
                off = np.fmax.reduce(spread, axis=3, initial=0) / LARGEST[dtype]
                off = off + 4 * DType.float32.unit_roundoff * ideal
                parts[f"{name[0]}_scales"] = written[name].astype(np.float64), ideal, off
    return check.within(parts)
