"""Self-tests of one instruction: the registers that it writes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[Any]
Expected = Callable[[Words, Words, Words, Words], Any]

RDNA3, RDNA4, CDNA = ("gfx1100", "gfx1151"), ("gfx1200", "gfx1201"), ("gfx942", "gfx950")
RDNA = (*RDNA3, *RDNA4)
ALL = (*RDNA, *CDNA)
U = np.uint32


@dataclass(frozen=True)
class InstructionTest:
    """One test. In ``assembly`` %0 is the result d, %1 to %3 are a, b and c, %4 is the address of
    a's lane in global memory and %5 that of a word of LDS for each lane; WAIT waits for memory."""

    name: str
    archs: tuple[str, ...]
    assembly: str
    expected: Expected
    """The words that d must hold, of a, b, c and d's first value."""
    kinds: str = "hhhh"
    """What a, b, c and d are: h two float16, f a float32, g a float32 that float16 represents, i an
    integer, s selectors, w four bytes: 64 lanes have each once."""
    compare: str = ""
    """"": bit for bit; else "f" or "h", as float32 or pairs of float16, within the tolerance; or
    "e", as float32 that are equal, or both NaN."""
    tolerance: float = 1e-5


def kernel(test: InstructionTest, name: str, arch: str) -> str:
    """A kernel of one wave that executes the instruction in every lane."""
    text = assembly(test.assembly, arch).replace('"', '\\"').replace("\n", "\\n")
    used = ("memory", "s20", "s21", "vcc", *(f"v{i}" for i in (50, *range(60, 66), 128, 129)))
    registers = ", ".join(f'"{r}"' for r in used)
    return (
        f'extern "C" __global__ void {name}(const u32* A, const u32* B, const u32* C, const u32* '
        "D, u32* out) {\n"
        "  __shared__ u32 words[64]; int l = threadIdx.x; words[l] = 0;\n"
        "  u32 a = A[l], b = B[l], c = C[l], d = D[l];\n"
        f'  asm volatile("{text}" : "+v"(d) : "v"(a), "v"(b), "v"(c), "v"(A + l),\n'
        '               "v"((u32)(size_t)(__attribute__((address_space(3))) u32*)(words + l))\n'
        f"               : {registers});\n"
        "  out[l] = d + (words[l] == 0xdeadbeefu);\n}\n"  # the words must stay in LDS
    )


def assembly(text: str, arch: str) -> str:
    """What archs call differently, filled in."""
    old = arch in CDNA
    wait = (
        "s_wait_dscnt 0x0\ns_wait_loadcnt 0x0" if arch in RDNA4 else "s_waitcnt vmcnt(0) lgkmcnt(0)"
    )
    store_a = "v_mov_b32 v50, %5\nDS_STORE_b32 v50, %1\nWAIT"
    words = {
        "STORE_A": store_a,
        "DS_LOAD": "ds_read" if old else "ds_load",
        "DS_STORE": "ds_write" if old else "ds_store",
        "WAIT": wait,
    }
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def operand(kind: str, lanes: int, rng: np.random.Generator) -> Words:
    """Random registers of a kind."""
    if kind == "h":
        return rng.standard_normal((lanes, 2)).astype(np.float16).view(U).ravel()
    if kind in "fg":
        x = rng.standard_normal(lanes)
        return (x.astype(np.float16) if kind == "g" else x).astype(np.float32).view(U)
    if kind == "w":
        return rng.permutation(256)[np.arange(4 * lanes) % 256].astype(np.uint8).view(U)
    if kind == "s":
        return rng.integers(0, 8, (lanes, 4)).astype(np.uint8).view(U).ravel()
    return rng.integers(0, 1 << 32, lanes, dtype=U)


def difference(test: InstructionTest, actual: Words, expected: Words) -> str:
    """Which lanes are wrong and how; "" where none is."""
    if test.compare == "f":
        right = np.isclose(
            floats(actual), floats(expected), rtol=test.tolerance, atol=test.tolerance
        )
    elif test.compare == "e":
        right = (floats(actual) == floats(expected)) | np.isnan(floats(actual)) & np.isnan(
            floats(expected)
        )
    elif test.compare == "h":
        right = np.isclose(low(actual), low(expected), rtol=2e-3, atol=2e-3)
        right &= np.isclose(high(actual), high(expected), rtol=2e-3, atol=2e-3)
    else:
        right = actual == expected
    if right.all():
        return ""
    lane = int((~right).argmax())
    return (
        f"{int((~right).sum())} lanes differ, lane {lane} is {actual[lane]:08x} and must be "
        f"{expected[lane]:08x}"
    )


# ---------------------------------------------------------------- registers as numbers


def floats(x: Words) -> Floats:
    return x.view(np.float32)


def words(x: Any) -> Words:
    """A float32's bits."""
    return np.asarray(x, np.float32).view(U)


def low(x: Words) -> Floats:
    """The float16 in the low bits."""
    values: Floats = np.ascontiguousarray(x & U(0xFFFF)).astype(np.uint16).view(np.float16)
    return values


def high(x: Words) -> Floats:
    return low(x >> U(16))


def half(x: Any) -> Words:
    """A float16's bits."""
    return np.asarray(x, np.float16).view(np.uint16).astype(U)


def pair(first: Any, second: Any) -> Words:
    """Two float16 in one register, the first in the low bits."""
    return half(first) | half(second) << U(16)


def into(old: Words, bits: Words, upper: bool) -> Words:
    """A register of which 16 bits are replaced."""
    return old & U(0xFFFF) | bits << U(16) if upper else old & U(0xFFFF0000) | bits


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def wide(x: Words) -> npt.NDArray[np.uint64]:
    return x.astype(np.uint64)


def as_bytes(x: Words, dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """[lane, byte]"""
    values: npt.NDArray[Any] = np.ascontiguousarray(x).view(dtype).reshape(len(x), 4)
    return values
