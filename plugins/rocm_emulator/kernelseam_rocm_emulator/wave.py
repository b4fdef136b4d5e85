"""A wave as patches see it: the emulator's register files as NumPy arrays over the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

REGISTERS = 256
SCALARS = 260
"""Scalar registers, inline constants, and at PC and PC + 1 the program counter."""
PC, EXEC, M0 = 256, 126, 124
INVERSE_TWO_PI = 248


class Wave:
    """One wave's state. Register files are [register, lane]; addresses are the host's."""

    def __init__(
        self, lanes: int, scalars: int, vectors: int, accumulators: int, shared: int, scratch: int
    ) -> None:
        self.lanes = lanes
        self.scalars: Words = _array(scalars, SCALARS)
        self.vectors: Words = _array(vectors, REGISTERS * lanes).reshape(REGISTERS, lanes)
        self.accumulators: Words = _array(accumulators, REGISTERS * lanes).reshape(REGISTERS, lanes)
        self.shared = shared
        self.arguments = [
            ctypes.c_uint64(x) for x in (scalars, vectors, 0, shared, scratch, accumulators)
        ]
        """What the emulator's own instructions take: the register files, memory from 0 on, LDS,
        scratch."""
        self._pc = ctypes.c_uint64.from_address(scalars + 4 * PC)

    @property
    def pc(self) -> int:
        return self._pc.value

    @pc.setter
    def pc(self, value: int) -> None:
        self._pc.value = value

    def active(self) -> Mask:
        """Which lanes take part."""
        mask = int(self.scalars[EXEC]) | (
            int(self.scalars[EXEC + 1]) << 32 if self.lanes == 64 else 0
        )
        bits = np.frombuffer(mask.to_bytes(8, "little"), np.uint8)
        return np.unpackbits(bits, count=self.lanes, bitorder="little").astype(bool)

    def pair(self, register: int) -> int:
        """A 64-bit value in two scalar registers."""
        return int(self.scalars[register]) | int(self.scalars[register + 1]) << 32

    def set_pair(self, register: int, value: int) -> None:
        self.scalars[register], self.scalars[register + 1] = value & 0xFFFFFFFF, value >> 32


def _array(address: int, count: int) -> Words:
    memory: Any = (ctypes.c_uint32 * count).from_address(address)
    return np.frombuffer(memory, np.uint32)


def bits(word: int, low: int, count: int) -> int:
    """``count`` bits of an instruction, from bit ``low`` on."""
    return word >> low & (1 << count) - 1
