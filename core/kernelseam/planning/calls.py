"""What a caller holds: a plan, and calls of it over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, LaunchRecord
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dispatch import Choice
from kernelseam.errors import CallInUse, InvalidValue, not_copied
from kernelseam.planning.binding import bind
from kernelseam.planning.planned import Planned
from kernelseam.planning.streams import ready_of, stream_handle
from kernelseam.planning.workspace import allocate, check_workspace, given_workspace
from kernelseam.plugins import plugins
from kernelseam.trace import active
from kernelseam.verifier import verifier


@dataclass(frozen=True)
class Plan(Planned):
    """A list of launches over one workspace, for one problem on one device. Immutable and
    thread-safe."""

    choice: Choice
    note: str = ""

    @property
    def implementation(self) -> str:
        """The chosen implementation's name."""
        return self.choice.implementation.name

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        """What a call launches, in order."""
        return tuple(s.record for s in self.parts.steps)

    def bind(self, *, workspace: object = None, check: bool = False, **operands: object) -> Call:
        """A call over these operands; those not named come from the descriptor.

        ``workspace``: an array or address of at least ``workspace_bytes``, at a multiple of
        ``parts.workspace_alignment``, which no operand may share; allocated where it is None. Where
        the plan wants its first bytes zero they are set here, and waited for: not in a graph's
        capture. ``check=True`` also reads device memory that holds addresses, lengths, offsets or
        block tables, here and before every launch (as is always done on the host), and raises
        InvalidValue where they leave memory; and it holds the result of every call against the
        float64 oracle (some rows of it where it is large; an attention's gradients not at all): a
        call then raises WrongResult naming implementation, device and worst element. Both
        synchronise and copy to the host: for tests, not for a graph's capture. Raises InvalidValue
        for null or misaligned addresses, a wrong device, an unknown or missing name, and an output
        or a workspace that overlaps an operand.
        """
        if not isinstance(check, bool | np.bool_):
            raise InvalidValue("check", check, "must be True or False", "Pass a bool")
        return Call(self, workspace, bool(check), operands)

    def __copy__(self) -> Plan:
        return self  # nothing of it changes

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_copied(
            "a plan", "Plan the descriptor again, which is cheap where it was planned before"
        )


class Call:
    """A plan bound to memory. Calling it only launches.

    All its launches use one workspace and write the same outputs. So it is for one thread and one
    stream at a time: a second thread that calls it meanwhile is refused with CallInUse, and of two
    streams the second must wait for the first, by an event or by synchronising, which nobody
    checks. ``rebind`` gives a call with a workspace of its own.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_check",
        "_check_device",
        "_given",
        "_is_current",
        "_keep",
        "_launches",
        "_only_launches",
        "_owned_workspace",
        "_pointers",
        "_records",
        "_runtime",
        "_stream",
        "_turn",
        "_workspace",
        "plan",
    )

    def __init__(
        self, plan: Plan, workspace: object, check: bool, operands: Mapping[str, object]
    ) -> None:
        self.plan = plan
        self._given = {**plan.descriptor.operands(), **operands}
        self._workspace, self._check = workspace, check
        self._turn: list[None] = [None]  # empty while a thread is in it
        runtime = plugins().backend(plan.device.backend).runtime
        self._runtime = runtime
        with runtime.activate(plan.device):
            resolved = plan.descriptor.resolve(self._given, runtime, plan.device)
            self._arrays = resolved.arrays
            first = self._arrays[0] if self._arrays else None
            ready = ready_of(runtime, plan.device, first)
            self._is_current, self._stream = ready.is_current, ready.current_stream
            bound = bind(plan, resolved, runtime, lambda: self._workspace_of(resolved), check=check)
            # once: what this call's launches find there they leave there
            if (zeroing := plan.zeroing) is not None:
                zeroing.bind({}, bound.workspace)(self.stream_handle(None))
                runtime.synchronize(plan.device)
        self._check_device = bound.check_contents
        self._only_launches = self._check_device is None and not check
        self._launches: list[Callable[[int], object]] = [*bound.launches]
        if tensors := _written_tensors(plan, self._given):
            tell = torch_arrays.teller()
            self._launches.append(lambda handle: tell(tensors))
        self._records = bound.records
        self._keep, self._pointers = resolved.keep, resolved.pointers

    def _workspace_of(self, resolved: Resolved) -> int:
        """The address of the workspace that was given, else of one of its own."""
        plan, given = self.plan, self._workspace
        if given is None:
            if not plan.workspace_bytes:
                return 0
            first = self._arrays[0] if self._arrays else None
            room = allocate(plan.workspace_room, plan.device, self._runtime, first)
            self._owned_workspace = room.owner
            return plan.workspace_in(room.pointer)
        address = given_workspace(given, plan.workspace_bytes, plan.device)
        if plan.workspace_bytes:
            runtime = self._runtime if self._check else None
            check_workspace(plan, address, resolved, runtime)
        return address

    def __call__(self, stream: object = None) -> None:
        """Launch on a stream: an int handle, an object with ``__cuda_stream__``, or None, the array
        library's current one. Allocates nothing and does not synchronise, unless it was bound with
        ``check=True``.

        Raises CallInUse where another thread is in it.
        """
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = self.stream_handle(stream)
        turn = self._turn
        try:
            # atomic, and a third of a lock's time; a signal's handler runs before it or within the
            # try
            del turn[0]
        except IndexError:
            raise CallInUse(self.plan.problem, self.plan.device) from None
        try:
            if self._only_launches and self._is_current():
                for launch in self._launches:
                    launch(handle)
                if traced := active():
                    self._trace(traced)
            else:
                self._launch(handle)
        finally:
            turn.append(None)

    def _launch(self, handle: int) -> None:
        """With what stands before and after the launches, and the device made current."""
        # what stands in memory may have changed since it was bound
        if self._check_device is not None:
            with self._runtime.activate(self.plan.device):
                self._check_device()
        checked = verifier()(self.plan, self._pointers, self._runtime) if self._check else None
        with self._runtime.activate(self.plan.device):
            for launch in self._launches:
                launch(handle)
        self._trace(active())
        if checked is not None:
            checked.require()

    def _trace(self, traced: Sequence[list[LaunchRecord]]) -> None:
        for records in traced:
            records.extend(self._records)

    def stream_handle(self, stream: object) -> int:
        """The integer handle of a stream as ``__call__`` takes it."""
        return stream_handle(
            stream, self._runtime, self.plan.device, self._arrays[0] if self._arrays else None
        )

    def launcher(self) -> Callable[[int], None]:
        """``launch(handle)`` for timing loops of one thread: the same launches without looking up a
        stream."""

        def run(handle: int) -> None:
            for launch in self._launches:
                launch(handle)

        return run

    def rebind(self, *, workspace: object = None, **operands: object) -> Call:
        """A call of the same plan over other memory; operands not named stay. Its workspace is its
        own, but where this call was given one: that stays, too, unless another is given."""
        return Call(
            self.plan,
            self._workspace if workspace is None else workspace,
            self._check,
            {**self._given, **operands},
        )

    def __copy__(self) -> Call:
        return self  # a second one would share its workspace

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_copied("a call", "Bind its plan to other memory with call.rebind(…)")


def _written_tensors(plan: Plan, given: Mapping[str, object]) -> tuple[object, ...]:
    """The torch tensors, one by one or in lists, that a call over these operands writes to."""
    names = {rule.name for rule in plan.problem.operands if rule.written}
    matrix = getattr(getattr(plan.descriptor, "lists", plan.descriptor), "matrix", None)
    found: list[object] = []
    for name, value in given.items():
        if name in names:
            found.append(value)
        elif matrix is not None and isinstance(value, list | tuple) and matrix(name).written:
            found += cast(Sequence[object], value)
    arrays = (x.owner if isinstance(x, ArrayInfo) else x for x in found)
    return tuple(x for x in arrays if torch_arrays.is_tensor(x))
