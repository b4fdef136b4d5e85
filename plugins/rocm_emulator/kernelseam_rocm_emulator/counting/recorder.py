"""What every instruction of a launch did: executions, LDS clocks, segments. Runs in the emulator's
process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kernelseam_rocm_emulator.counting import banks, model
from kernelseam_rocm_emulator.counting.banks import Addresses
from kernelseam_rocm_emulator.counting.instructions import LDS, Access, Class
from kernelseam_rocm_emulator.counting.segments import SIZES, Segments, segments
from kernelseam_rocm_emulator.wave import Wave

_ADDRESS_BITS = (1 << 48) - 1
"""Of a buffer descriptor's first two words; an address's others are zeros."""


@dataclass
class Tally:
    """One instruction, over all waves of a launch."""

    count: float = 0
    lds_clocks: float = 0
    lds_fewest: float = 0
    """LDS clocks without conflicts."""
    bytes: int = 0
    touched: list[int] = field(default_factory=lambda: [0] * len(SIZES))
    """By `segments.SIZES`."""
    fewest: list[int] = field(default_factory=lambda: [0] * len(SIZES))


class Recorder:
    """Counts one launch: called with each instruction's address and the wave, before it runs."""

    def __init__(self, arch: str, accesses: Mapping[int, Access]) -> None:
        """``accesses``: of the kernel's instructions, by address in the code object."""
        self.tallies: dict[int, Tally] = {}
        self._unit, self._accesses = model.unit(arch), accesses
        # Addresses repeat from wave to wave and from one iteration to the next, but for a start.
        self._clocks: dict[tuple[bool, int, bytes, bytes], tuple[int, int]] = {}
        self._segments: dict[tuple[int, bytes], Segments] = {}

    def __call__(self, address: int, wave: Wave) -> None:
        tally = self.tallies.get(address)
        if tally is None:
            tally = self.tallies[address] = Tally()
        tally.count += 1
        access = self._accesses.get(address)
        if access is not None:
            (self._lds if access.kind in LDS else self._memory)(access, wave, tally)

    def _lds(self, access: Access, wave: Wave, tally: Tally) -> None:
        active, reads = wave.active(), access.kind is Class.LDS_READ
        registers = wave.vectors[access.register].astype(np.int64)
        for offset in access.offsets:
            addresses = registers + offset
            key = (reads, access.width, addresses[active].tobytes(), active.tobytes())
            cached = self._clocks.get(key)
            if cached is None:
                served = self._unit.banks(reads, access.width)
                cached = self._clocks[key] = banks.clocks(served, access.width, addresses, active)
            tally.lds_clocks += cached[0]
            tally.lds_fewest += cached[1]
        tally.bytes += int(active.sum()) * access.width * len(access.offsets)

    def _memory(self, access: Access, wave: Wave, tally: Tally) -> None:
        active = wave.active()
        if not active.any():
            return
        addresses = _addresses(access, wave)[active]
        start = int(addresses.min()) & -SIZES[-1]
        relative = addresses - start
        key = (access.width, relative.tobytes())
        cached = self._segments.get(key)
        if cached is None:
            cached = self._segments[key] = segments(access.width, relative)
        if access.to_lds:  # lane after lane: no conflicts
            clocks = len(self._unit.banks(False, access.width).phases)
            tally.lds_clocks += clocks
            tally.lds_fewest += clocks
        tally.bytes += cached.bytes
        for i in range(len(SIZES)):
            tally.touched[i] += cached.touched[i]
            tally.fewest[i] += cached.fewest[i]


def _addresses(access: Access, wave: Wave) -> Addresses:
    """Of every lane. Offsets in vector registers are unsigned 32-bit ones."""
    (offset,) = access.offsets
    if access.register < 0:
        low = np.zeros(wave.lanes, np.int64)
    else:
        low = wave.vectors[access.register].astype(np.int64)
    if access.base >= 0:
        start = wave.pair(access.base) & _ADDRESS_BITS
    else:
        low, start = low | wave.vectors[access.register + 1].astype(np.int64) << 32, 0
    addresses: Addresses = low + (start + offset)
    return addresses
