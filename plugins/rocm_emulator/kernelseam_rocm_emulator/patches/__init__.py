"""Patches: instructions that the emulator lacks or gets wrong, executed here on a wave's registers.
One module a family of instructions.

An instruction that a family's ``find`` knows is executed by its patch instead of by the emulator.
`compiled.install` patches functions of the emulator's own compiler. The self-test has a kernel for
each patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelseam_rocm_emulator.patches import (
    atomics,
    buffers,
    compiled,
    conversions,
    lanes,
    mfma,
    scalar,
    shared,
    unaligned,
    wmma,
)
from kernelseam_rocm_emulator.wave import Wave

__all__ = ["Patch", "compiled", "find"]

Step = Callable[[Wave], bool | None]


@dataclass(frozen=True)
class Patch:
    """One decoded instruction: what it does to a wave, and by how many bytes it moves the program
    counter.

    With ``may_decline`` the step returns False where it leaves this wave's state to the emulator.
    """

    step: Step
    size: int
    may_decline: bool = False


def find(word: int, name: str, family: str, size: int, arch: str = "") -> Patch | None:
    """The patch of an instruction, or None where the emulator executes it right.

    ``word``: 16 bytes from its first on, little-endian; ``name``: AMD's mnemonic in capitals, ""
    where the emulator knows none; ``family``: "cdna", "rdna3" or "rdna4"; ``size``: in bytes;
    ``arch``: tells formats of numbers apart.
    """
    for of_arch in (conversions.find, mfma.find):
        if (known := of_arch(word, name, family, arch)) is not None:
            return Patch(known, size)
    for module in (wmma, shared, buffers, atomics, lanes, scalar, unaligned):
        step: Step | None = module.find(word, name, family)
        if step is not None:
            return Patch(step, 0 if module is scalar else size, module is unaligned)
    return None
