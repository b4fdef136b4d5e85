"""A case's operands, whatever its operation: values, memory, descriptor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import Device, Problem, Runtime
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.oracle.formulas import Array
from kernelseam.samples.case import Case
from kernelseam.samples.data.memory import Layout
from kernelseam.samples.operations.operation import Placed
from kernelseam.samples.operations.table import operation_of

BASE = 1 << 40
"""An address that is aligned as allocated memory is."""


def values(case: Case) -> dict[str, Array]:
    """Inputs by name, [batch, head, row, column] whatever their view; a GEMM's C too where it is
    read or gets injected values."""
    return operation_of(case).values(case)


def layout(case: Case, separate: bool = False) -> Layout:
    """Every operand's placement in buffers."""
    return operation_of(case).layout(case, separate)


def outputs(case: Case) -> tuple[str, ...]:
    return operation_of(case).outputs(case)


def describe(
    case: Case, layout: Layout, addresses: Mapping[str, Any], runtime: Runtime, device: Device
) -> Descriptor:
    """The descriptor of a case over addresses."""
    return operation_of(case).describe(case, Placed(layout, addresses, runtime, device))


def problem_of(case: Case, runtime: Runtime, device: Device) -> Problem:
    """What is planned for a case, over memory that is not there."""
    placed = layout(case)
    blocks = placed.blocks()
    addresses = {
        n: BASE + blocks[p.block][1] + p.offset * p.dtype.itemsize
        for n, p in placed.placements.items()
    }
    problem: Problem = describe(case, placed, addresses, runtime, device).simplified()[0].problem()
    return problem


def repeatable(case: Case) -> bool:
    """Whether a second launch has the same inputs, and so must give the same bits."""
    return operation_of(case).repeatable(case)
