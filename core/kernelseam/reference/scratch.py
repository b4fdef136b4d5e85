"""The workspace, split into arrays, so that a call allocates nothing of the problem's size."""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

from kernelseam.contract import host_array
from kernelseam.dtypes import DType

_ALIGN = 64  # bytes: a cache line, and the widest vector


def scratch_bytes(sizes: tuple[int, ...], dtype: DType) -> int:
    """Bytes that ``carve`` needs for pieces of these many elements; 0 where all are empty."""
    total = sum(_round(n * dtype.itemsize) for n in sizes)
    return total + _ALIGN if total else 0


def carve(workspace: int, sizes: tuple[int, ...], dtype: DType) -> list[npt.NDArray[Any]]:
    """One flat array for each size, one after the other from the address on, on cache lines."""
    size = dtype.itemsize
    whole = host_array(
        _round(workspace), (sum(_round(n * size) for n in sizes) // size,), (1,), dtype
    )
    pieces, at = [], 0
    for n in sizes:
        pieces.append(whole[at : at + n])
        at += _round(n * size) // size
    return pieces


def shaped(piece: npt.NDArray[Any], *shape: int) -> npt.NDArray[Any]:
    """The front of a flat piece, row-major in this shape."""
    return piece[: math.prod(shape)].reshape(shape)


def _round(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
