"""Memory: loads that go straight to LDS (CDNA), buffer instructions (gfx11), and the cache control
of barriers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from kernelseam_rocm_emulator.wave import M0, Wave, bits

_CACHE = re.compile(r"(GLOBAL_(INV|WB|WBINV)|BUFFER_(INV|WBL2))$")
_TO_LDS = re.compile(r"GLOBAL_LOAD_LDS_DWORD(X3|X4)?$")
_BUFFER = 0b111000
"""MUBUF's encoding on gfx11, for which the emulator has no names."""
_LOADS, _STORES, _INVALIDATE = (20, 21, 22, 23), (26, 27, 28, 29), (43, 44)
"""Its opcodes: of one to four words; and BUFFER_GL0_INV and BUFFER_GL1_INV."""
_NULL = 124


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if _CACHE.match(name):
        return _nothing
    if family == "cdna" and (match := _TO_LDS.match(name)):
        return _load_to_lds(word, int((match[1] or "X1")[1:]))
    if family == "rdna3" and bits(word, 26, 6) == _BUFFER:
        opcode, indexed = bits(word, 18, 8), bits(word, 55, 1)
        if opcode in _INVALIDATE:
            return _nothing
        for opcodes in (_LOADS, _STORES):
            if opcode in opcodes and not indexed:
                return _buffer(word, opcodes is _STORES, opcodes.index(opcode) + 1)
    return None


def _nothing(wave: Wave) -> None:
    """There is no cache that could be stale."""


def _load_to_lds(word: int, words: int) -> Callable[[Wave], None]:
    """Lane after lane, side by side from M0 on, of which bits 2 to 17 count (AMD's guides to CDNA 3
    and 4, chapter 10.3)."""
    offset = bits(word, 0, 12) - bits(word, 12, 1) * 0x1000
    address, base = bits(word, 32, 8), bits(word, 48, 7)

    def step(wave: Wave) -> None:
        target = wave.shared + (int(wave.scalars[M0]) & 0x3FFFC) + offset
        for lane in wave.active().nonzero()[0].tolist():
            low = int(wave.vectors[address, lane])
            source = (
                low | int(wave.vectors[address + 1, lane]) << 32
                if base == 0x7F
                else wave.pair(base) + low
            )
            ctypes.memmove(target + 4 * words * lane, source + offset, 4 * words)

    return step


def _buffer(word: int, stores: bool, words: int) -> Callable[[Wave], None]:
    """Raw buffers: what lies beyond the records reads as 0 and is not written."""
    offset, register, data = bits(word, 0, 12), bits(word, 32, 8), bits(word, 40, 8)
    resource, has_register, scalar = 4 * bits(word, 48, 5), bits(word, 54, 1), bits(word, 56, 8)

    def step(wave: Wave) -> None:
        base = wave.pair(resource) & (1 << 48) - 1
        records, more = (
            int(wave.scalars[resource + 2]),
            0 if scalar == _NULL else int(wave.scalars[scalar]),
        )
        for lane in wave.active().nonzero()[0].tolist():
            at = offset + (int(wave.vectors[register, lane]) if has_register else 0)
            for i in range(words):
                inside = at + 4 * i + 4 <= records
                place = (
                    ctypes.c_uint32.from_address(base + more + at + 4 * i)
                    if inside
                    else ctypes.c_uint32(0)
                )
                if stores:
                    place.value = int(wave.vectors[data + i, lane])
                else:
                    wave.vectors[data + i, lane] = place.value

    return step
