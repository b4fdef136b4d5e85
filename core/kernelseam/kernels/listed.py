"""Launches over lists of products of known specs and classes, packed from a problem's numbers:
nothing is chosen, compiled or traced again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kernelseam.contract import Device
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.dispatch import select
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.kernels.elements import INT32
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.kernels.tracing import Enqueue, traced_launches, traced_steps
from kernelseam.plugins import plugins
from kernelseam.symbolic import Untraceable
from kernelseam.tuned.classes import class_of_lists

_MOST = 1024
_SOMEWHERE = 1 << 40
"""An address that nothing reads."""


class ListedKernel:
    """What computes problems of a spec and a class in one launch."""

    def __init__(
        self, problem: GroupedGemmPointersProblem, device: Device, implementation: str | None
    ) -> None:
        """Raises Unsupported where nothing takes the problem, Untraceable where that is not one
        kernel of the core's making."""
        choice = select(problem, device, implementation)
        chosen = choice.implementation
        if not isinstance(chosen, KernelImplementation):
            raise Untraceable(f"{chosen.name} is no kernel of the core's making")
        self._tile, self._device = chosen.tile(problem, device, choice.variant), device
        launches = traced_launches(chosen, problem, self._tile, device)
        if launches is None or len(launches.steps) != 1 or launches.workspace_bytes:
            raise Untraceable("not one launch without a workspace")
        runtime = plugins().backend(device.backend).runtime
        addresses = {rule.name: _SOMEWHERE for rule in problem.operands}
        (step,) = traced_steps(launches, chosen.toolchain, runtime, device, addresses, 0, 0)
        (launch,) = launches.kernels
        self._kernel, self._once, self._kept = launch.kernel, step.once, step.kept
        self._names = [name for name, *_ in launch.kernel.signature(problem.spec).scalars]
        self._operands = launch.kernel.pointers(problem.spec)

    def packed(
        self, problem: GroupedGemmPointersProblem, addresses: Mapping[str, int], kept: bool
    ) -> Enqueue | None:
        """The launch of a problem of the class over lists at these addresses, to run once, before
        another is packed, or where ``kept`` any number of times; None where the kernel does not
        take the problem."""
        values = self._kernel.values(problem, self._tile, self._device)
        if values["total"] >= INT32:
            return None
        values = {**values, **{p: addresses.get(n, 0) for p, n in self._operands.items()}}
        pack = self._kept if kept else self._once
        return pack(values["blocks"], *[values[name] for name in self._names])


class ListedKernels:
    """By spec, class, device and named implementation."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, ListedKernel | None] = {}

    def find(
        self, problem: GroupedGemmPointersProblem, device: Device, implementation: str | None
    ) -> ListedKernel | None:
        """None where problems of the class must be planned."""
        key = (problem.spec, class_of_lists(problem), device, implementation)
        if key not in self._entries:
            while len(self._entries) >= _MOST:
                self._entries.pop(next(iter(self._entries), key), None)
            try:
                self._entries[key] = ListedKernel(problem, device, implementation)
            except (InvalidValue, Unsupported, Untraceable):
                self._entries[key] = None
        return self._entries[key]
