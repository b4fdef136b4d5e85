"""What the operations' NumPy implementations have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Cost, Device, LaunchRecord, OperandRule, host_array
from kernelseam.costs import roofline
from kernelseam.dtypes import DType

P = TypeVar("P")
"""An operation's problem."""
Array = npt.NDArray[Any]


class NumpyImplementation(Generic[P]):
    """Supports every problem, where an operation's does not say otherwise."""

    name, backend = "numpy", "numpy"

    def supports(self, problem: P, device: Device) -> str | None:
        return None

    def cost(self, problem: P, device: Device) -> Cost:
        of: Any = problem
        return roofline(of, device.limits, 0.5)


def operand_arrays(rules: Iterable[OperandRule], pointers: Mapping[str, int]) -> dict[str, Array]:
    """Operands by name; lists of addresses are of uint64."""
    return {r.name: operand_array(r, pointers.get(r.name, 0)) for r in rules}


def operand_array(rule: OperandRule, pointer: int) -> Array:
    if rule.dtype is None:
        return host_array(pointer, rule.shape, rule.strides, DType.float64).view(np.uint64)
    return host_array(pointer, rule.shape, rule.strides, rule.dtype)


def recorded(
    operation: str, device: Device, grid: tuple[int, int, int] = (1, 1, 1)
) -> LaunchRecord:
    """How a step appears among launches."""
    return LaunchRecord(f"numpy_{operation}", grid, (1, 1, 1), 0, device.arch)
