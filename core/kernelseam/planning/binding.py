"""Binds a plan to memory: checks operands, reads contents that the host may read, takes a workspace
and packs arguments.

``Plan.bind`` and the functions on arrays both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kernelseam.containment import error_text
from kernelseam.contract import LaunchRecord, Runtime, Step
from kernelseam.contract_values import validated_launch
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.errors import KernelSeamError, PluginError
from kernelseam.launch_trace import Planned, Recording, active
from kernelseam.planning.checks import check_operands
from kernelseam.planning.planned import BindablePlan
from kernelseam.planning.workspace import check_workspace_address


class BoundLaunches:
    """The launches of one plan, or of several in order, bound to memory."""

    __slots__ = ("_steps", "check_contents", "launches", "plans", "run", "workspace")

    def __init__(
        self,
        steps: tuple[Step, ...] | Callable[[], tuple[Step, ...]],
        launches: tuple[Callable[[int], None], ...],
        workspace: int = 0,
        check_contents: Callable[[], None] | None = None,
        plans: tuple[Planned, ...] = (),
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
            recording.add(self.records, self.plans)


def in_order(launches: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """One function that launches all of them. Of one it is that one: a loop around it takes a tenth
    of a launch's time."""
    if len(launches) == 1:
        return launches[0]

    def run(handle: int) -> None:
        for launch in launches:
            launch(handle)

    return run


def joined(parts: Iterable[BoundLaunches]) -> BoundLaunches:
    """All launches in order. Of several parts, ``check_contents`` is dropped."""
    parts = tuple(parts)
    if len(parts) == 1:
        return parts[0]
    return BoundLaunches(
        tuple([s for b in parts for s in b.steps]),
        tuple([x for b in parts for x in b.launches]),
        plans=tuple([p for b in parts for p in b.plans]),
    )


def bind(
    planned: BindablePlan,
    resolved: Resolved,
    runtime: Runtime,
    workspace: Callable[[], int],
    *,
    check: bool = False,
    shared: bool = False,
) -> BoundLaunches:
    """Bind a plan's launches to these addresses; its device must be current.

    ``workspace()``: the address of at least ``workspace_bytes``, called once the operands are
    checked. ``shared``: others may write to the workspace between two runs, so that bytes that must
    start as zero are set in each run. ``check``: also read device memory that holds addresses,
    lengths, offsets or tables, as is always done on the host. Raises InvalidValue for null,
    misaligned and overlapping addresses, and for contents that point outside of memory;
    PluginError where a step's ``bind`` raises or returns no function.
    """
    address = None
    if (known := planned.known) is not None and not (check or shared or planned.device.is_host):
        address = workspace()
        check_workspace_address(address, planned)
        known_launches = known.bind(resolved.pointers, address)
        if known_launches is not None:
            return BoundLaunches(lambda: planned.parts.steps, known_launches, address)
    check_operands(planned.problem.operands, resolved)
    check_contents = None
    # Reading host memory needs no synchronisation.
    if check or planned.device.is_host:
        check_contents = planned.contents_check(resolved, runtime)
        if check_contents is not None:
            check_contents()
    if address is None:
        address = workspace()
        check_workspace_address(address, planned)
    steps = planned.parts.steps
    if shared and (zeroing := planned.zeroing) is not None:
        steps = (zeroing, *steps)
    launches = tuple([_bound_step(planned, s, resolved.pointers, address) for s in steps])
    return BoundLaunches(steps, launches, address, check_contents)


def _bound_step(
    planned: BindablePlan, step: Step, pointers: Mapping[str, int], workspace: int
) -> Callable[[int], None]:
    """A plugin's step bound to memory. Its own faults become a PluginError that names it."""
    try:
        launch = step.bind(pointers, workspace)
    except (KernelSeamError, MemoryError):
        raise
    except Exception as e:
        raise PluginError(
            f"bind() of {planned.implementation!r}, step {step.record.kernel!r}, raised "
            f"{error_text(e)}. Name another implementation, or leave that plugin out"
        ) from e
    return launch if callable(launch) else validated_launch(planned.implementation, step, launch)
