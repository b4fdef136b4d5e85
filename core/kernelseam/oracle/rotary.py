"""Rotation of heads in float64, as the formula of rotary embeddings has it."""

from __future__ import annotations

import numpy as np

from kernelseam.oracle.formulas import Array, Floats


def rotate(y: Floats, size: Floats, tables: tuple[Array, Array], style: str, at: Array) -> None:
    """Rotate rows y [batch, head, token, column], in place, by those of cosines and sines that
    ``at`` [batch, token] says; and their magnitudes by these tables' magnitudes."""
    cos, sin = (t.astype(np.float64)[at][:, None] for t in tables)
    n = 2 * cos.shape[3]
    i = np.arange(0, n, 2) if style == "pairs" else np.arange(n // 2)
    j = i + 1 if style == "pairs" else i + n // 2
    first, second = y[..., i], y[..., j]
    y[..., i], y[..., j] = first * cos - second * sin, second * cos + first * sin
    cos, sin, first, second = np.abs(cos), np.abs(sin), size[..., i], size[..., j]
    size[..., i], size[..., j] = first * cos + second * sin, second * cos + first * sin
