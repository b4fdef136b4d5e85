"""Exchange between lanes: ds_swizzle, the swaps of gfx950, and RDNA's permutations of 16 lanes by a
literal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelseam_rocm_emulator.wave import Wave, bits

_LITERAL = 255
_SWAPS = {"V_PERMLANE16_SWAP_B32": 16, "V_PERMLANE32_SWAP_B32": 32}


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if name == "DS_SWIZZLE_B32":
        return _swizzle(bits(word, 0, 16), bits(word, 32, 8), bits(word, 56, 8))
    if name.startswith(("V_PERMLANE16_B32", "V_PERMLANEX16_B32")) and bits(word, 32, 9) >= 256:
        return _permute(word, name.startswith("V_PERMLANEX16"))
    swap = next((n for start, n in _SWAPS.items() if name.startswith(start)), None)
    if swap is not None and bits(word, 0, 9) >= 256:
        return _swap(bits(word, 0, 9) - 256, bits(word, 17, 8), swap)
    return None


def _swizzle(pattern: int, source: int, destination: int) -> Callable[[Wave], None] | None:
    lane = np.arange(64)
    if pattern >> 15 == 0:  # and-, or- and xor-masks of 5 bits
        within = (lane & 31 & pattern | pattern >> 5 & 31) ^ pattern >> 10 & 31
        origin = lane & ~31 | within & 31
    elif pattern >> 8 == 0x80:  # one of four neighbours
        origin = lane & ~3 | pattern >> 2 * (lane & 3) & 3
    else:
        return None

    def step(wave: Wave) -> None:
        active, values = wave.active(), wave.vectors[source]
        from_ = origin[: wave.lanes]
        moved = np.where(active[from_], values[from_], 0)
        wave.vectors[destination] = np.where(active, moved, wave.vectors[destination])

    return step


def _permute(word: int, crosswise: bool) -> Callable[[Wave], None]:
    """Each lane of a row of 16 takes the value of the lane that its four bits of two scalars name,
    in the same row or, ``crosswise``, in the other one. The emulator misreads a literal among the
    scalars."""
    destination, source, literal = bits(word, 0, 8), bits(word, 32, 9) - 256, bits(word, 64, 32)
    from_inactive, zero = bits(word, 11, 1), bits(word, 12, 1)
    selectors = bits(word, 41, 9), bits(word, 50, 9)
    lane = np.arange(32)

    def step(wave: Wave) -> None:
        low, high = (literal if s == _LITERAL else int(wave.scalars[s]) for s in selectors)
        both = low | high << 32
        chosen = np.array([both >> 4 * i & 15 for i in range(16)])
        origin = (lane & 16 ^ 16 * crosswise) + chosen[lane & 15]
        active, values, old = wave.active(), wave.vectors[source], wave.vectors[destination]
        moved = np.where(active[origin] | bool(from_inactive), values[origin], 0 if zero else old)
        wave.vectors[destination] = np.where(active, moved, old)

    return step


def _swap(source: int, destination: int, width: int) -> Callable[[Wave], None]:
    """Odd groups of ``width`` lanes of the destination change places with even ones of the
    source."""
    odd = np.arange(64) // width % 2 == 1

    def step(wave: Wave) -> None:
        first, second = wave.vectors[destination].copy(), wave.vectors[source].copy()
        wave.vectors[destination, odd] = second[~odd]
        wave.vectors[source, ~odd] = first[odd]

    return step
