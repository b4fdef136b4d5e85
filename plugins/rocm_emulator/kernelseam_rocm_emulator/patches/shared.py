"""LDS: loads into one half of a register, which must leave the other half alone."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from kernelseam_rocm_emulator.wave import Wave, bits

_NAME = re.compile(r"DS_(?:LOAD|READ)_(U8|I8|U16)_D16(_HI)?$")
_TYPES: dict[str, Any] = {"U8": ctypes.c_uint8, "I8": ctypes.c_int8, "U16": ctypes.c_uint16}


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    match = _NAME.match(name)
    if match is None:
        return None
    kind, high = _TYPES[match[1]], match[2] is not None
    offset, address, destination = bits(word, 0, 16), bits(word, 32, 8), bits(word, 56, 8)
    accumulate = family == "cdna" and bits(word, 25, 1) == 1

    def step(wave: Wave) -> None:
        file = wave.accumulators if accumulate else wave.vectors
        addresses, old = wave.vectors[address].tolist(), file[destination].tolist()
        for lane in wave.active().nonzero()[0].tolist():
            value = kind.from_address(wave.shared + offset + addresses[lane]).value & 0xFFFF
            old[lane] = old[lane] & 0xFFFF | value << 16 if high else old[lane] & 0xFFFF0000 | value
        file[destination] = old

    return step
