"""Lists of matrices as the descriptors over addresses take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam_thirdvendor import AcmeArray

Array = npt.NDArray[Any]
SPACED = "addresses are evenly spaced: the strided way is taken"


def matrices(count: int, rows: int, columns: int, dtype: str = "f4", seed: int = 0) -> list[Array]:
    """Matrices at unevenly spaced multiples of 16 bytes."""
    rng = np.random.default_rng(seed)
    unit = 16 // np.dtype(dtype).itemsize
    step = -(-rows * columns // unit) * unit
    pool = aligned(step * count + unit * count * count, dtype)
    results, begin = [], 0
    for i in range(count):
        results.append(pool[begin : begin + rows * columns].reshape(rows, columns))
        results[-1][...] = rng.standard_normal((rows, columns))
        begin += step + unit * (i % 3)
    return results


def aligned(count: int, dtype: str = "f4") -> Array:
    """Zeros that begin at a multiple of 16 bytes."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + count * size].view(dtype)


def at(x: Array) -> int:
    return x.ctypes.data


def on_device(x: list[Array], kind: str = "i8") -> AcmeArray:
    """Their addresses, in memory that the host may not read unasked."""
    return AcmeArray(np.array([at(m) for m in x]).astype(kind))


def frozen(x: Array) -> Array:
    view = x.view()
    view.flags.writeable = False
    return view
