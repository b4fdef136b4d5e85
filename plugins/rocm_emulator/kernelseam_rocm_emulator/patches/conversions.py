"""e4m3 to float32, of which the emulator compiles no instruction: one number, or two neighbours;
and two numbers to e4m3, which it makes OCP's on every arch.

gfx942 has the format without infinities whose only NaN is −0 (FNUZ), later archs that of OCP.
Sources: AMD's guides to the instruction sets of MI300, CDNA 4 and RDNA 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits

_NAME = re.compile(r"V_CVT_(PK_)?F32_FP8(_E32|_E64)?$")
_ROUNDING = re.compile(r"V_CVT_PK_FP8_F32(_E64)?$")
_SDWA = 249
_BYTES = {**{i: i for i in range(4)}, 4: 0, 5: 2, 6: 0}
"""Where what SDWA selects begins: a byte, a word, or all."""


def find(word: int, name: str, family: str, arch: str) -> Callable[[Wave], None] | None:
    dtype: Any = ml_dtypes.float8_e4m3fnuz if arch == "gfx942" else ml_dtypes.float8_e4m3fn
    if _ROUNDING.match(name):
        return _rounding(word, dtype)
    match = _NAME.match(name)
    if match is None:
        return None
    two, wide = match[1] is not None, match[2] == "_E64"
    at = 0
    if wide:
        destination, source, modifiers = bits(word, 0, 8), bits(word, 32, 9), bits(word, 61, 3)
        # RDNA 4: of two numbers bit 11 selects the word, of one the bits 11 and 12 the byte.
        at = bits(word, 11, 1) * 2 + (0 if two else bits(word, 12, 1))
        modifiers |= bits(word, 8, 3) | bits(word, 15, 1) | bits(word, 59, 2)
        if family == "cdna":
            modifiers |= bits(word, 11, 4)
    else:
        destination, source, modifiers = bits(word, 17, 8), bits(word, 0, 9), 0
        if family == "cdna" and source == _SDWA:
            source = bits(word, 32, 8) + 256 * (1 - bits(word, 55, 1))
            at = _BYTES.get(bits(word, 48, 3), 0)
            # a whole result, nothing clamped, scaled, extended or negated
            modifiers = bits(word, 40, 8) ^ 6 | bits(word, 51, 3)
    if modifiers or not (source < 106 or source >= 256):
        return None  # left to the emulator, which refuses it
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).view(np.uint32)

    def step(wave: Wave) -> None:
        active = wave.active()
        held = wave.vectors[source - 256] if source >= 256 else wave.scalars[source]
        result = [values[held >> np.uint32(8 * (at + i)) & np.uint32(255)] for i in range(1 + two)]
        for i, x in enumerate(result):
            wave.vectors[destination + i] = np.where(active, x, wave.vectors[destination + i])

    return step


def _rounding(word: int, dtype: Any) -> Callable[[Wave], None] | None:
    """Two numbers to the nearest e4m3, in the half of the destination that ``op_sel`` names; the
    other half stays."""
    destination, sources = bits(word, 0, 8), (bits(word, 32, 9), bits(word, 41, 9))
    if bits(word, 8, 3) or bits(word, 11, 3) or bits(word, 15, 1) or bits(word, 59, 5):
        return None  # absolute, negated, clamped, scaled
    shift = np.uint32(16 * bits(word, 14, 1))
    kept = ~(np.uint32(0xFFFF) << shift)

    def step(wave: Wave) -> None:
        halves = np.zeros(wave.lanes, np.uint32)
        for i, source in enumerate(sources):
            held = wave.vectors[source - 256] if source >= 256 else wave.scalars[source]
            numbers = np.broadcast_to(held, wave.lanes).astype(np.uint32).view(np.float32)
            halves |= numbers.astype(dtype).view(np.uint8).astype(np.uint32) << np.uint32(8 * i)
        before = wave.vectors[destination]
        wave.vectors[destination] = np.where(wave.active(), before & kept | halves << shift, before)

    return step
