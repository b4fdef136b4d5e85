"""Latent keys of 8 bits whose rows have their scales, as the numbers that they stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kernelseam.oracle.formulas import Array


def scaled_rows(rows: Array, value_dim: int, block: int) -> tuple[Array, Array]:
    """(keys, values) of rows of float8_e4m3fn: ``value_dim`` numbers, float32 scales, bfloat16. A
    number stands for its product with its scale."""
    x = np.ascontiguousarray(rows)
    count = value_dim // block
    numbers = x[..., :value_dim].astype(np.float64)
    behind = np.ascontiguousarray(x[..., value_dim:]).view(np.uint8)
    scales = np.ascontiguousarray(behind[..., : 4 * count]).view(np.float32)
    others = np.ascontiguousarray(behind[..., 4 * count :]).view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        scaled = numbers * np.repeat(scales, block, axis=-1)
    return np.concatenate([scaled, others.astype(np.float64)], axis=-1), scaled
