"""The one way from a plan to launches over memory: operands are checked, contents that the host may
read are read, a workspace is taken, arguments are packed.

``Plan.bind`` and the functions on arrays both go it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kernelseam.contract import LaunchRecord, Runtime, Step
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.planning.checks import check_operands
from kernelseam.planning.planned import Planned
from kernelseam.planning.workspace import check_workspace_address
from kernelseam.trace import active


class Bound:
    """A plan's launches over memory, or those of several plans in turn."""

    __slots__ = ("check_contents", "launches", "steps", "workspace")

    def __init__(
        self,
        steps: tuple[Step, ...],
        launches: tuple[Callable[[int], object], ...],
        workspace: int = 0,
        check_contents: Callable[[], None] | None = None,
    ) -> None:
        self.steps, self.launches = steps, launches
        self.workspace, self.check_contents = workspace, check_contents

    @property
    def records(self) -> tuple[LaunchRecord, ...]:
        """What is launched, in order."""
        return tuple(s.record for s in self.steps)

    def launch(self, handle: int) -> None:
        """Launch on a stream of the device, which is current, and record it where that is asked
        for."""
        for launch in self.launches:
            launch(handle)
        if traced := active():
            for records in traced:
                records.extend(self.records)


def joined(several: Iterable[Bound]) -> Bound:
    """One after the other; their contents are no longer looked at."""
    parts = tuple(several)
    if len(parts) == 1:
        return parts[0]
    return Bound(
        tuple([s for b in parts for s in b.steps]), tuple([x for b in parts for x in b.launches])
    )


def bind(
    planned: Planned,
    resolved: Resolved,
    runtime: Runtime,
    workspace: Callable[[], int],
    *,
    check: bool = False,
    shared: bool = False,
) -> Bound:
    """A plan's launches over these addresses; its device must be current.

    ``workspace()``: the address of at least ``workspace_bytes``, asked for when the operands have
    passed; ``shared`` where others may write to it between two launches, so that what must start as
    zeros is set at each. ``check`` also reads device memory that holds addresses, lengths, offsets
    or tables, as is always done on the host. Raises InvalidValue for null, misaligned and
    overlapping addresses, and for contents that leave memory.
    """
    check_operands(planned.problem.operands, resolved)
    check_contents = None
    # The host reads its own memory without waiting for anything.
    if check or planned.device.is_host:
        check_contents = planned.contents_check(resolved, runtime)
        if check_contents is not None:
            check_contents()
    address = workspace()
    check_workspace_address(address, planned.parts)
    steps = planned.parts.steps
    if shared and (zeroing := planned.zeroing) is not None:
        steps = (zeroing, *steps)
    launches = tuple([s.bind(resolved.pointers, address) for s in steps])
    return Bound(steps, launches, address, check_contents)
