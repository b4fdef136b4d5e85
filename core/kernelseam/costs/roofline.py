"""The fewest seconds that a device's peaks allow."""

from __future__ import annotations

from kernelseam.contract import Cost, DeviceLimits, Problem
from kernelseam.dtypes import DType

SLOW = 1e11
"""Operations a second where a device tells none."""


def peak(limits: DeviceLimits, dtype: DType) -> float:
    """Operations a second of a dtype, of all compute units."""
    return limits.operations_per_second.get(dtype.value, SLOW)


def roofline(problem: Problem, limits: DeviceLimits, efficiency: float = 1.0) -> Cost:
    """The time that memory or arithmetic needs at least, whichever is longer, over
    ``efficiency``."""
    rate = peak(limits, problem.compute_dtype)
    seconds = max(problem.operations / rate, problem.bytes_moved / limits.bytes_per_second)
    return Cost(
        problem.bytes_moved, problem.operations, limits.launch_seconds + seconds / efficiency
    )
