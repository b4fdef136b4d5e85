"""Plans of problems whose like were planned: see ``known_problems``."""

from __future__ import annotations

from collections.abc import Callable

from kernelseam.contract import Device, PlanParts, Problem
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import Choice
from kernelseam.forking import cached_property
from kernelseam.known_problems import KnownLaunches
from kernelseam.planning.calls import Plan

Build = Callable[[], tuple[Choice, PlanParts]]


class KnownPlan(Plan):
    """A plan that is bound from its problem's numbers. Who else could compute it, and its launches'
    records, are found where they are asked for."""

    def __init__(
        self,
        descriptor: Descriptor,
        problem: Problem,
        device: Device,
        note: str,
        known: KnownLaunches,
        build: Build,
    ) -> None:
        vars(self).update(
            descriptor=descriptor,
            problem=problem,
            device=device,
            note=note,
            _known=known,
            _build=build,
        )

    @property
    def known(self) -> KnownLaunches:
        known: KnownLaunches = vars(self)["_known"]
        return known

    @cached_property
    def _built(self) -> tuple[Choice, PlanParts]:
        build: Build = vars(self)["_build"]
        return build()

    @property
    def choice(self) -> Choice:
        return self._built[0]

    @property
    def parts(self) -> PlanParts:
        return self._built[1]

    @property
    def workspace_bytes(self) -> int:
        return self.known.workspace_bytes

    @property
    def workspace_alignment(self) -> int:
        return self.known.workspace_alignment

    @property
    def zeroed_bytes(self) -> int:
        return self.known.zeroed_bytes
