"""CDNA: floats added to memory out of accumulation registers, which the emulator takes for vector
registers; integers added with the old value returned, which it does not return."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if family != "cdna":
        return None
    returns, in_accumulators = bits(word, 16, 1), bits(word, 55, 1)
    if name == "GLOBAL_ATOMIC_ADD_F32" and in_accumulators and not returns:
        return _add_float(word)
    if name == "GLOBAL_ATOMIC_ADD" and returns and not in_accumulators:
        return _add_returning(word)
    return None


def _add_float(word: int) -> Callable[[Wave], None]:
    data = bits(word, 40, 8)

    def step(wave: Wave) -> None:
        added = np.ascontiguousarray(wave.accumulators[data]).view(np.float32)
        for lane, address in _places(word, wave):
            place = ctypes.c_float.from_address(address)
            place.value = float(np.float32(place.value) + added[lane])

    return step


def _add_returning(word: int) -> Callable[[Wave], None]:
    data, destination = bits(word, 40, 8), bits(word, 56, 8)

    def step(wave: Wave) -> None:
        added = wave.vectors[data].copy()
        for lane, address in _places(word, wave):
            place = ctypes.c_uint32.from_address(address)
            wave.vectors[destination, lane] = place.value
            place.value += int(added[lane])  # modulo 2^32, as ctypes takes integers

    return step


def _places(word: int, wave: Wave) -> list[tuple[int, int]]:
    """Active lanes and the addresses that each of them names."""
    address, base = bits(word, 32, 8), bits(word, 48, 7)
    offset = bits(word, 0, 12) - (bits(word, 12, 1) << 12)
    places = wave.vectors[address].astype(np.int64) + offset
    in_scalars = base < 124
    places = places + (
        wave.pair(base) if in_scalars else wave.vectors[address + 1].astype(np.int64) << 32
    )
    return [(lane, int(places[lane])) for lane in wave.active().nonzero()[0].tolist()]
