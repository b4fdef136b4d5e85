"""Elements of matrices as registers hold them, to and from float64 or int64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernelseam_rocm_emulator.wave import Words

Numbers = npt.NDArray[Any]

TYPES: dict[str, Any] = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP8": ml_dtypes.float8_e4m3fn,
    "FP8FNUZ": ml_dtypes.float8_e4m3fnuz,
    "BF8": ml_dtypes.float8_e5m2,
    **dict.fromkeys(("F32", "XF32"), np.float32),
}
BITS = {"F16": 16, "BF16": 16, "XF32": 32, "IU8": 8, "FP8": 8, "FP8FNUZ": 8, "BF8": 8, "IU4": 4}


def unpack(words: Words, kind: str, signed: bool) -> Numbers:
    """[lane, register] → [lane, element], low bits first."""
    rows = np.ascontiguousarray(words)
    if kind == "IU8":
        return rows.view(np.int8 if signed else np.uint8).astype(np.int64)
    if kind == "IU4":
        packed = rows.view(np.uint8)
        values = np.stack([packed & 15, packed >> 4], -1).reshape(len(rows), -1).astype(np.int64)
        return np.where(values > 7, values - 16, values) if signed else values
    if kind == "XF32":  # cut off: how they are rounded is not documented
        return (rows & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    floats: Numbers = rows.view(TYPES[kind]).astype(np.float64)
    return floats


def half_bits(values: Numbers, kind: str) -> Words:
    """Numbers as the 16-bit patterns of a half-precision dtype."""
    return values.astype(TYPES[kind]).view(np.uint16).astype(np.uint32)
