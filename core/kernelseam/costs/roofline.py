"""The roofline: the least time that a device's peaks allow."""

from __future__ import annotations

from kernelseam.contract import Cost, DeviceLimits, Problem
from kernelseam.dtypes import DType

DEFAULT_RATE = 1e11
"""Operations per second where a device gives no rate."""


def peak(limits: DeviceLimits, dtype: DType) -> float:
    """Operations per second of a dtype on all compute units."""
    return limits.operations_per_second.get(dtype._value_, DEFAULT_RATE)


def roofline(problem: Problem, limits: DeviceLimits, efficiency: float = 1.0) -> Cost:
    """The time that memory or arithmetic needs at least, whichever is longer, over
    ``efficiency``."""
    rate = peak(limits, problem.compute_dtype)
    seconds = max(problem.operations / rate, problem.bytes_moved / limits.bytes_per_second)
    return Cost(
        problem.bytes_moved, problem.operations, limits.launch_seconds + seconds / efficiency
    )
