"""The predicted time of one launch, from compute time and memory time.

Blocks run on the compute units in waves. The compute time is waves · (a block's operations / its
tile's rate + the block's overhead); where blocks differ in length, half of the difference between
the longest and the average is added as tail. Few blocks of a long sum take as long as one does,
which waits for memory slice by slice. The memory time is bytes / achieved bandwidth. The two
overlap partly: the launch takes √(compute² + memory²), close to the longer where they differ, and
1.4 times either where they are equal; where loads run ahead of what is computed, a higher norm of
the two, close to the longer. What the first blocks start with overlaps with neither.

Rates are fractions of a device's peaks, so that one row of coefficients serves all devices of an
arch, which differ in units, clock and memory.
"""

from __future__ import annotations

from typing import NamedTuple

from kernelseam.contract import Coefficients, DeviceLimits
from kernelseam.costs.roofline import peak
from kernelseam.dtypes import DType


class Work(NamedTuple):
    """The work of one launch."""

    bytes: int
    """Bytes read and written."""
    blocks: int = 0
    """Blocks of the grid; tiles where blocks are persistent."""
    operations: float = 0.0
    """Average operations of a block, including padding."""
    longest: float = 0.0
    """Operations of the longest block, where blocks differ."""
    dtype: DType = DType.float32
    """The dtype whose peak rate applies."""
    rate: float = 1.0
    """The fraction of the dtype's rate that the tile's main loop reaches."""
    block_seconds: float = 0.0
    """Overhead of a block on its compute unit."""
    alone: float = 0.0
    """Seconds of a block that no other hides: it waits for one slice of its operands after the
    other."""
    waiting: float = 0.0
    """Seconds of its loads' latency that other blocks do not hide; they overlap with the rest as
    compute and memory time do."""
    start: float = 0.0
    """Seconds before the first products, in which next to nothing is loaded."""
    overlap: float = 2.0
    """The norm of compute time, memory time and ``waiting`` that they take together."""


_UNKNOWN = Coefficients("nothing")


def predicted(work: Work, coefficients: Coefficients | None, limits: DeviceLimits) -> float:
    """Seconds of a launch; without coefficients, from the device's peaks."""
    known = coefficients or _UNKNOWN
    units = max(limits.compute_units, 1)
    rate = peak(limits, work.dtype) * known.multiply.get(work.dtype, 1.0) * work.rate / units
    block = work.operations / rate
    tail = max(work.longest / rate - block, 0.0) / 2 if work.blocks else 0.0
    waves = -(-work.blocks // units)
    computing = max(waves * (block + work.block_seconds) + tail, work.alone)
    moving = work.bytes / (limits.bytes_per_second * known.bandwidth)
    norm = work.overlap
    together: float = (computing**norm + moving**norm + work.waiting**norm) ** (1 / norm)
    return limits.launch_seconds + work.start + together
