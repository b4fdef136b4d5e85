"""CDNA: floats added to memory out of accumulation registers, which the emulator takes for vector
registers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if (
        family != "cdna"
        or name != "GLOBAL_ATOMIC_ADD_F32"
        or not bits(word, 55, 1)
        or bits(word, 16, 1)
    ):
        return None
    address, data, base = bits(word, 32, 8), bits(word, 40, 8), bits(word, 48, 7)
    offset = bits(word, 0, 12) - (bits(word, 12, 1) << 12)

    def step(wave: Wave) -> None:
        places = wave.vectors[address].astype(np.int64) + offset
        in_scalars = base < 124
        places = places + (
            wave.pair(base) if in_scalars else wave.vectors[address + 1].astype(np.int64) << 32
        )
        added = np.ascontiguousarray(wave.accumulators[data]).view(np.float32)
        for lane in wave.active().nonzero()[0].tolist():
            place = ctypes.c_float.from_address(int(places[lane]))
            place.value = float(np.float32(place.value) + added[lane])

    return step
