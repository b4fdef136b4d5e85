"""LDS bank conflicts of one access of a wave, from the addresses of its lanes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernelseam_rocm_emulator.counting.model import Banks

Addresses = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def clocks(banks: Banks, width: int, addresses: Addresses, active: Mask) -> tuple[int, int]:
    """(LDS clocks of the access, LDS clocks without bank conflicts).

    ``addresses``: [lanes], in bytes; ``active``: [lanes], which of them are active. In a phase each
    bank serves one word of 4 bytes per clock, to all lanes that read that word; phases without an
    active lane take no clocks.
    """
    cycles = fewest = 0
    for phase in banks.phases:
        group = list(phase)
        first = addresses[group][active[group]] // 4
        if first.size:
            words = np.unique(first[:, None] + np.arange(max(1, width // 4)))
            cycles += int(np.bincount(words % banks.count).max())
            fewest += 1
    return cycles, fewest
