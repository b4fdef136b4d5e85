"""``BoundLaunches``: the launches of plans with addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kernelseam.contract import LaunchRecord, Step
from kernelseam.launch_trace import Recording, TracedProblem, active
from kernelseam.planning.binding import in_order


class Traced(Protocol):
    """A plan, as traces see it."""

    @property
    def traced_problem(self) -> TracedProblem: ...


class BoundLaunches:
    """The launches of one plan, or of several in order, bound to memory."""

    __slots__ = ("_steps", "check_contents", "launches", "plans", "run", "workspace")

    def __init__(
        self,
        steps: tuple[Step, ...] | Callable[[], tuple[Step, ...]],
        launches: tuple[Callable[[int], None], ...],
        workspace: int = 0,
        check_contents: Callable[[], None] | None = None,
        plans: tuple[Traced, ...] = (),
    ) -> None:
        """``steps``: those of the launches, or a function that finds them."""
        self._steps, self.launches, self.run = steps, launches, in_order(launches)
        self.plans = plans  # for traces
        self.workspace, self.check_contents = workspace, check_contents

    @property
    def steps(self) -> tuple[Step, ...]:
        """What the launches were bound from."""
        if callable(self._steps):
            self._steps = self._steps()
        return self._steps

    @property
    def records(self) -> tuple[LaunchRecord, ...]:
        """The launches, in order."""
        return tuple(s.record for s in self.steps)

    def launch(self, handle: int) -> None:
        """Launch on a stream of the device, which must be current; record the launches in active
        traces."""
        self.run(handle)
        if traced := active():
            self.record(traced)

    def record(self, traced: Sequence[Recording]) -> None:
        """Add the launches to these traces."""
        for recording in traced:
            recording.add(self.records, [p.traced_problem for p in self.plans])
