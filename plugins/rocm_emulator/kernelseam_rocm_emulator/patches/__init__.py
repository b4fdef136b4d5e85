"""Mends: what the emulator lacks or gets wrong, done by us on a wave's registers. One module a
family of instructions.

An instruction that a family knows is carried out by its mend instead of by the emulator.
`compiled.install` mends what the emulator compiles itself. The self-test has a kernel for every one
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelseam_rocm.emulation.mends import (
    atomics,
    buffers,
    compiled,
    lanes,
    mfma,
    scalar,
    shared,
    unaligned,
    wmma,
)
from kernelseam_rocm.emulation.wave import Wave

__all__ = ["Mend", "compiled", "find"]

Step = Callable[[Wave], bool | None]


@dataclass(frozen=True)
class Mend:
    """One decoded instruction: what it does to a wave, and by how many bytes it moves the program
    counter.

    With ``may_decline`` the step returns False where it leaves this wave's state to the emulator.
    """

    step: Step
    size: int
    may_decline: bool = False


def find(word: int, name: str, family: str, size: int) -> Mend | None:
    """The mend of an instruction, or None where the emulator does it right.

    ``word``: 16 bytes from its first on, little-endian; ``name``: AMD's mnemonic in capitals, ""
    where the emulator knows none; ``family``: "cdna", "rdna3" or "rdna4"; ``size``: in bytes.
    """
    for module in (mfma, wmma, shared, buffers, atomics, lanes, scalar, unaligned):
        step: Step | None = module.find(word, name, family)
        if step is not None:
            return Mend(step, 0 if module is scalar else size, module is unaligned)
    return None
