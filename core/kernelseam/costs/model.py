"""The time of one launch: what its blocks take of the compute units, and what its bytes take of
memory.

A device deals blocks to its compute units in rounds. A unit's time is rounds · (a block's
operations over the rate of its tile, and what starting and ending it costs); where blocks differ in
length, half of what the longest has more than the average is waited for at the end. Memory's time
is bytes over the bandwidth that a copy reaches. The two overlap, but not wholly: the launch takes
the root of the sum of their squares, which is nearly the longer one where they differ, and 1.4
times either where they are equal.

Rates are parts of a device's peaks, so that one row serves every device of an arch: cards differ in
units, clock and memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelseam.contract import Coefficients, DeviceLimits
from kernelseam.costs.roofline import peak
from kernelseam.dtypes import DType


@dataclass(frozen=True)
class Work:
    """One launch as the model sees it."""

    bytes: int
    """That cross memory."""
    blocks: int = 0
    """Of the grid; where blocks are persistent, tiles."""
    operations: float = 0.0
    """Of a block on average, with those on padding."""
    longest: float = 0.0
    """Of the longest block, where they differ."""
    dtype: DType = DType.float32
    """Whose rate bounds the operations."""
    rate: float = 1.0
    """The part of the dtype's rate that the tile's loop reaches while it runs."""
    block_seconds: float = 0.0
    """What starting and ending a block takes of a compute unit."""


_UNKNOWN = Coefficients("nothing")


def predicted(work: Work, coefficients: Coefficients | None, limits: DeviceLimits) -> float:
    """Seconds of a launch; without coefficients by the device's peaks."""
    known = coefficients or _UNKNOWN
    units = max(limits.compute_units, 1)
    rate = peak(limits, work.dtype) * known.multiply.get(work.dtype, 1.0) * work.rate / units
    block = work.operations / rate
    tail = max(work.longest / rate - block, 0.0) / 2 if work.blocks else 0.0
    computing = -(-work.blocks // units) * (block + work.block_seconds) + tail
    moving = work.bytes / (limits.bytes_per_second * known.bandwidth)
    return limits.launch_seconds + math.hypot(computing, moving)
