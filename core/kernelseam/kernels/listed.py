"""Launches over lists of products of known specs and classes, packed from a problem's numbers:
nothing is chosen, compiled or traced again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kernelseam.contract import Device
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.dispatch import select
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.kernels.tracing import (
    Encoded,
    Enqueue,
    TracedStep,
    traced_launches,
    traced_steps,
)
from kernelseam.plugins import plugins
from kernelseam.symbolic import Untraceable
from kernelseam.tuned.classes import class_of_lists

_MOST = 1024
_SOMEWHERE = 1 << 40
"""An address that nothing reads."""
WORKSPACE_WORDS = 32
"""Numbers of 64 bits at whose multiples workspaces begin."""


class ListedKernel:
    """What computes problems of a spec and a class, in a launch or several."""

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
        if launches is None or len(launches.kernels) != len(launches.steps):
            raise Untraceable("no kernels alone")
        if launches.zeroed_bytes or launches.workspace_alignment > 8 * WORKSPACE_WORDS:
            raise Untraceable("a workspace that is not any memory")
        self._composition = chosen.composition
        self._row = chosen.toolchain.arch_row(device.arch)
        runtime = plugins().backend(device.backend).runtime
        addresses = {rule.name: _SOMEWHERE for rule in problem.operands}
        steps = traced_steps(
            launches, chosen.toolchain, runtime, device, addresses, _SOMEWHERE, _SOMEWHERE
        )
        self._steps = [
            _Step(launch.kernel, step, launch.workspace)
            for launch, step in zip(launches.kernels, steps, strict=True)
        ]

    def workspace_words(self, problem: GroupedGemmPointersProblem) -> int:
        """Numbers of 64 bits that its launches of a problem need, whole ``WORKSPACE_WORDS``."""
        if len(self._steps) == 1 and not self._steps[0].workspace:
            return 0
        size = self._composition.launches(problem, self._tile, self._device).workspace_bytes
        return -(-size // (8 * WORKSPACE_WORDS)) * WORKSPACE_WORDS

    def packed(
        self,
        problem: GroupedGemmPointersProblem,
        addresses: Mapping[str, int],
        workspace: int,
        kept: bool,
    ) -> list[Enqueue] | None:
        """The launches of a problem of the class over lists at these addresses, to run once, before
        another is packed, or where ``kept`` any number of times; None where the kernel does not
        take the problem."""
        if not self._composition.takes(problem, self._tile, self._row, self._device):
            return None
        kept = kept or len(self._steps) > 1
        return [
            x.packed(problem, self._tile, self._device, addresses, workspace, kept)
            for x in self._steps
        ]


class _Step:
    """One of the launches. Its tensor maps are those of any problem of the class."""

    def __init__(self, kernel: Any, step: TracedStep, workspace: Mapping[str, int]) -> None:
        self._kernel, self._once, self._kept = kernel, step.once, step.kept
        self.workspace = workspace
        signature = step.signature
        assert signature is not None
        names = [name for name, *_ in signature.scalars]
        maps = zip(names, step.arguments[1:], strict=True)
        self._maps = {n: x for n, x in maps if isinstance(x, Encoded)}
        self._names = names

    def packed(
        self,
        problem: GroupedGemmPointersProblem,
        tile: Any,
        device: Device,
        addresses: Mapping[str, int],
        workspace: int,
        kept: bool,
    ) -> Enqueue:
        kernel = self._kernel
        values = {
            **kernel.values(problem, tile, device),
            **{p: addresses.get(n, 0) for p, n in kernel.pointers(problem.spec).items()},
            **{p: workspace + at for p, at in self.workspace.items()},
        }
        for name, x in self._maps.items():
            values[name] = x.encode(x.extents, x.strides, values[name])
        pack = self._kept if kept else self._once
        return pack(kernel.grid(problem, tile, device), *[values[name] for name in self._names])


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
