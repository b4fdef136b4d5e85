"""The matrix's cases as descriptors over host memory, and the reference with a wrong result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.parity.matrix import named
from kernelseam.parity.running.stages import prepare
from kernelseam.plugins import plugins
from kernelseam.samples.operations import operands


def described(name: str) -> tuple[Any, Any]:
    """The descriptor of a case over host memory, and what keeps that."""
    case, backend = named(name), plugins().backend("numpy")
    before = prepare(case)
    blocks, layout = before.layout.blocks(), before.layout
    addresses = {
        n: before.buffers[blocks[p.block][0]].ctypes.data
        + blocks[p.block][1]
        + p.offset * p.dtype.itemsize
        for n, p in layout.placements.items()
    }
    (device,) = backend.runtime.devices()
    return operands.describe(case, layout, addresses, backend.runtime, device), before


@dataclass(frozen=True)
class Spoiled:
    """The reference, and then a function of one of its results."""

    operation: str
    result: str
    spoil: Callable[[Any], None]
    name: str = "spoiled"
    backend: str = "numpy"

    def supports(self, problem: Any, device: Device) -> str | None:
        return None

    def cost(self, problem: Any, device: Device) -> Cost:
        return Cost(0, 0, 1e3)

    def build(self, problem: Any, device: Device) -> PlanParts:
        right = next(
            i
            for i in plugins().registry.implementations
            if (i.name, i.operation) == ("numpy", self.operation)
        )
        parts = right.build(problem, device)
        return replace(parts, steps=(*parts.steps, _Spoil(problem, self.result, self.spoil)))


@dataclass(frozen=True)
class _Spoil:
    problem: Any
    result: str
    spoil: Callable[[Any], None]
    record = LaunchRecord("spoil", (1, 1, 1), (1, 1, 1), 0, "cpu")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        (rule,) = (r for r in self.problem.operands if r.name == self.result)
        address, shape, strides, dtype = pointers[self.result], rule.shape, rule.strides, rule.dtype
        if dtype is None:  # a list of addresses: the first element of the last one's matrix
            address = int((ctypes.c_uint64 * shape[0]).from_address(address)[-1])
            shape, strides, dtype = (1,), (1,), self.problem.spec.dtype
        x = host_array(address, shape, strides, dtype)
        return lambda stream: self.spoil(x)


def off(*at: int) -> Callable[[Any], None]:
    """One element a little off."""

    def spoil(x: Any) -> None:
        x[at] = x[at] * 1.1 + 0.1

    return spoil
