"""CDNA: floats added to memory out of accumulation registers, which the emulator takes for vector
registers. CDNA and RDNA 4: integers added with the old value returned, which it does not return."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if family == "rdna4" and name == "GLOBAL_ATOMIC_ADD_U32" and bits(word, 52, 1):
        return _add_returning(bits(word, 55, 8), bits(word, 32, 8), _PLACES_RDNA4.of(word))
    if family != "cdna":
        return None
    returns, in_accumulators = bits(word, 16, 1), bits(word, 55, 1)
    if name == "GLOBAL_ATOMIC_ADD_F32" and in_accumulators and not returns:
        return _add_float(bits(word, 40, 8), _PLACES_CDNA.of(word))
    if name == "GLOBAL_ATOMIC_ADD" and returns and not in_accumulators:
        return _add_returning(bits(word, 40, 8), bits(word, 56, 8), _PLACES_CDNA.of(word))
    return None


@dataclass(frozen=True)
class _Places:
    """An instruction's addresses: vector registers, a base in scalar ones or in none, an offset."""

    address: int
    base: int
    offset: int

    def each(self, wave: Wave) -> Iterator[tuple[int, int]]:
        """Active lanes and their addresses."""
        places = wave.vectors[self.address].astype(np.int64) + self.offset
        if self.base < _NO_BASE:
            places = places + wave.pair(self.base)
        else:
            places = places + (wave.vectors[self.address + 1].astype(np.int64) << 32)
        for lane in wave.active().nonzero()[0].tolist():
            yield lane, int(places[lane])


@dataclass(frozen=True)
class _Fields:
    """Where an encoding has them: the first bits, and how many bits an offset has."""

    address: int
    offset: int
    offset_bits: int
    base: int

    def of(self, word: int) -> _Places:
        offset = bits(word, self.offset, self.offset_bits)
        sign = offset >> self.offset_bits - 1
        return _Places(
            bits(word, self.address, 8),
            bits(word, self.base, 7),
            offset - (sign << self.offset_bits),
        )


_NO_BASE = 124
_PLACES_CDNA, _PLACES_RDNA4 = _Fields(32, 0, 13, 48), _Fields(64, 72, 24, 0)


def _add_float(data: int, places: _Places) -> Callable[[Wave], None]:
    def step(wave: Wave) -> None:
        added = np.ascontiguousarray(wave.accumulators[data]).view(np.float32)
        for lane, address in places.each(wave):
            place = ctypes.c_float.from_address(address)
            place.value = float(np.float32(place.value) + added[lane])

    return step


def _add_returning(data: int, destination: int, places: _Places) -> Callable[[Wave], None]:
    def step(wave: Wave) -> None:
        added = wave.vectors[data].copy()
        for lane, address in places.each(wave):
            place = ctypes.c_uint32.from_address(address)
            wave.vectors[destination, lane] = place.value
            place.value += int(added[lane])  # modulo 2^32, as ctypes takes integers

    return step
