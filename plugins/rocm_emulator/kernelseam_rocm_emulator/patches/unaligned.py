"""Global memory: words at addresses that are no multiple of four bytes, which the emulator rounds
down.

The compiler joins neighbouring 16-bit elements into words wherever they lie. Aligned accesses are
left to the emulator.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits

_NAME = re.compile(r"(GLOBAL|FLAT)_(LOAD|STORE)_(?:DWORD|B32|B64|B96|B128)(X2|X3|X4)?$")
_WORDS = {"B32": 1, "B64": 2, "B96": 3, "B128": 4, "DWORD": 1, "X2": 2, "X3": 3, "X4": 4}


def find(word: int, name: str, family: str) -> Callable[[Wave], bool] | None:
    """A step that returns whether it did the access: not where every address is aligned."""
    match = _NAME.match(name)
    if match is None:
        return None
    words, stores = _WORDS[match[3] or name.rpartition("_")[2]], match[2] == "STORE"
    accumulate = False
    if family == "rdna4":
        base, data, address = (
            bits(word, 0, 7),
            bits(word, 55, 8) if stores else bits(word, 32, 8),
            bits(word, 64, 8),
        )
        offset = bits(word, 72, 23) - (bits(word, 95, 1) << 23)
    else:
        base, data, address = (
            bits(word, 48, 7),
            bits(word, 40 if stores else 56, 8),
            bits(word, 32, 8),
        )
        offset = bits(word, 0, 12) - (bits(word, 12, 1) << 12)
        accumulate = family == "cdna" and bits(word, 55, 1) == 1
    scalar = match[1] == "GLOBAL" and base < 124

    def step(wave: Wave) -> bool:
        low = wave.vectors[address].astype(np.int64)
        if scalar:
            places = low + (wave.pair(base) + offset)
        else:
            places = low + (wave.vectors[address + 1].astype(np.int64) << 32) + offset
        lanes = wave.active().nonzero()[0]
        if not (places[lanes] & 3).any():
            return False
        file = wave.accumulators if accumulate else wave.vectors
        for lane in lanes.tolist():
            values = np.ascontiguousarray(file[data : data + words, lane])
            if stores:
                ctypes.memmove(int(places[lane]), values.ctypes.data, 4 * words)
            else:
                ctypes.memmove(values.ctypes.data, int(places[lane]), 4 * words)
                file[data : data + words, lane] = values
        return True

    return step
