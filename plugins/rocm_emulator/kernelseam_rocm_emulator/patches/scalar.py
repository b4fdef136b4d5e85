"""Jumps through registers: s_getpc, s_setpc and s_swappc, which calls are made of. They set the
program counter."""

from __future__ import annotations

from collections.abc import Callable

from kernelseam_rocm_emulator.wave import Wave, bits

_NAMES = ("S_GETPC_B64", "S_SETPC_B64", "S_SWAPPC_B64")


def find(word: int, name: str, family: str) -> Callable[[Wave], None] | None:
    if name not in _NAMES:
        return None
    destination, source = bits(word, 16, 7), bits(word, 0, 8)

    def step(wave: Wave) -> None:
        following = wave.pc + 4
        target = following if name == "S_GETPC_B64" else wave.pair(source)
        if name != "S_SETPC_B64":
            wave.set_pair(destination, following)
        wave.pc = target

    return step
