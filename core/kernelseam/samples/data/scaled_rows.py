"""Latent keys of 8 bits whose rows have their scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kernelseam.dtypes import LARGEST, DType
from kernelseam.oracle.formulas import Array

E4M3 = DType.float8_e4m3fn


def scaled_rows(k: Array, value_dim: int, block: int, rng: np.random.Generator) -> Array:
    """Rows of bytes, as float8_e4m3fn: ``value_dim`` numbers, a float32 scale for each ``block`` of
    them, by which the largest one is about the largest of 8 bits or, for a third of the blocks, a
    small one; and the other columns in bfloat16."""
    blocks = k[..., :value_dim].reshape(*k.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1) / LARGEST[E4M3]
    scales[rng.random(scales.shape) < 1 / 3] *= 2.0**7
    scales = scales.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.where(scales[..., None] > 0, blocks / scales[..., None], 0)
    parts = (
        np.clip(numbers, -LARGEST[E4M3], LARGEST[E4M3])
        .astype(E4M3.numpy)
        .reshape(*k.shape[:-1], value_dim),
        scales,
        k[..., value_dim:].astype(ml_dtypes.bfloat16),
    )
    rows = np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in parts], axis=-1)
    result: Array = rows.view(E4M3.numpy)
    return result
