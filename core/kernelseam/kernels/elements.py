"""Names of element types in device sources, and limits that all shared kernels have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from kernelseam.contract import ArchRow
from kernelseam.dtypes import DType
from kernelseam.kernels.config import ElementType
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import recorded

DEVICE_TYPE: Mapping[DType | None, ElementType] = {
    DType.float16: ElementType("f16"),
    DType.bfloat16: ElementType("bf16"),
    DType.float32: ElementType("float"),
    DType.float64: ElementType("double"),
    DType.float8_e4m3fn: ElementType("e4m3"),
    DType.float8_e4m3fnuz: ElementType("e4m3"),
    None: ElementType("void"),
}
"""e4m3 is that of the two that the arch converts; void stands for an operand that is not given."""

INT32 = 2**31
"""Extents and row strides are 32-bit in device sources; batch and head strides are 64-bit."""


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


def divider(d: int) -> tuple[int, int]:
    """(magic, shift) of base.h's FastDivmod, for 1 ≤ d < 2³¹; magic as a signed word."""
    return _magic(d), (d - 1).bit_length()


@recorded
@lru_cache(4096)
def _magic(d: int) -> int:
    magic = divide_up(2 ** (31 + (d - 1).bit_length()), d)
    return magic - 2**32 if magic >= 2**31 else magic


_DIVIDER = ("", "_magic", "_shift")


def divider_parameter(name: str) -> Structure:
    """A FastDivmod among a kernel's parameters."""
    members = tuple((f"{name}{part}", "i32") for part in _DIVIDER)
    return Structure(members, ("d", "magic", "shift"))


def divider_values(name: str, d: int) -> dict[str, int]:
    """Its members' values."""
    return dict(zip((f"{name}{part}" for part in _DIVIDER), (d, *divider(d)), strict=True))


def pad(dim: int, column_warps: int = 1) -> int:
    """A head dim as tiles hold it: rounded up to 16 columns for each of ``column_warps`` warps."""
    width = 16 * column_warps
    return -(-dim // width) * width


TF32_PRODUCTS: Mapping[str | None, int] = {None: 0, "tf32": 1, "tf32x3": 3}
"""By precision: the number of TF32 products that replace one float32 product."""


def refuse_precision(precision: str | None, tiles: Iterable[Any], row: ArchRow) -> str | None:
    """Why an arch, with all its ``tiles`` of an operation, does not multiply float32 so."""
    if precision is None or any(t.precision == precision for t in tiles):
        return None
    return f"has no {precision} products on {row.arch}"


def refuse_dtype(dtype: DType, row: ArchRow) -> str | None:
    """Why a shared kernel has no products of ``dtype`` on an arch: half precision needs matrix
    units."""
    if dtype.is_fp8 and dtype not in row.matrix_dtypes:
        own = [d for d in sorted(row.matrix_dtypes, key=str) if d.is_fp8]
        return f"{row.arch} multiplies {own[0] if own else 'no numbers of 8 bits'}, not {dtype}"
    if dtype.itemsize == 2 and dtype not in row.matrix_dtypes:
        return f"{row.arch} has no matrix instructions for {dtype}"
    return None


def refuse_stored(who: str, stored: DType, row: ArchRow) -> str | None:
    """Why an arch does not convert numbers of 8 bits as they are stored; ``who`` has them."""
    if stored in row.fp8_dtypes:
        return None
    if known := ", ".join(sorted(map(str, row.fp8_dtypes))):
        return f"{who} are {stored}: {row.arch} converts {known}"
    return f"{who} are {stored}: {row.arch} has no instructions that convert it"


def row_strides(problem: object, *names: str) -> dict[str, int]:
    """Strides of rows by name, of operands with strides (batch, head, row)."""
    return {f"stride_{n}_row": getattr(problem, f"{n}_strides")[2] for n in names}


def refuse_row_strides(**strides: int) -> str | None:
    """Why rows lie too far apart."""
    for name, stride in strides.items():
        if stride >= INT32:
            return f"{name} = {stride} elements: shared kernels take row strides below 2^31"
    return None
