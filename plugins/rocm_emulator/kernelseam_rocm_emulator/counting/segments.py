"""Segments of global memory that one access of a wave touches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelseam_rocm_emulator.counting.banks import Addresses

SIZES = (64, 128)
"""Bytes of a memory request, and of a cache line."""


@dataclass(frozen=True)
class Segments:
    """Counts of one access."""

    bytes: int
    """Bytes of all active lanes together."""
    touched: tuple[int, ...]
    """By `SIZES`, distinct aligned segments."""
    fewest: tuple[int, ...]
    """By `SIZES`, as few as hold the distinct bytes."""


def segments(width: int, addresses: Addresses) -> Segments:
    """Of the active lanes' ``addresses`` [n], n > 0, with ``width`` bytes each."""
    ends = np.concatenate([addresses, addresses + (width - 1)])
    distinct = int(np.unique(addresses[:, None] + np.arange(width)).size)
    # Where an access of a lane is longer than a segment there would be more between its ends.
    assert width <= min(SIZES)
    return Segments(
        addresses.size * width,
        tuple(int(np.unique(ends // size).size) for size in SIZES),
        tuple(-(-distinct // size) for size in SIZES),
    )
