"""``Plan``, and ``Call``: a plan that a user has bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from kernelseam.arrays import torch as torch_arrays
from kernelseam.capture import refuse_capture
from kernelseam.contract import (
    WORKSPACE_ALIGNMENT,
    ArrayInfo,
    Device,
    LaunchRecord,
    PlanParts,
    Problem,
    Runtime,
    Step,
)
from kernelseam.descriptors.common.protocol import Descriptor, Resolved
from kernelseam.dispatch import Choice
from kernelseam.errors import CallInUse, InvalidValue, copy_error
from kernelseam.forking import cached_property
from kernelseam.known_problems import KnownLaunches
from kernelseam.launch_trace import TracedProblem, active
from kernelseam.memset import MemsetStep
from kernelseam.planning.binding import bound_step
from kernelseam.planning.bound import BoundLaunches
from kernelseam.planning.checks import check_operands
from kernelseam.planning.streams import call_state, stream_handle
from kernelseam.planning.workspace import (
    allocate,
    check_workspace,
    check_workspace_address,
    workspace_address,
)
from kernelseam.plugins import plugins
from kernelseam.verifier import verifier

Built = tuple[Choice, PlanParts]


@dataclass(frozen=True, init=False, eq=False)
class Plan:
    """A list of launches over one workspace, for one problem on one device. Immutable and
    thread-safe."""

    descriptor: Descriptor
    problem: Problem
    device: Device
    note: str
    known: KnownLaunches | None
    """Its launches as a function of addresses, where problems like it were planned: see
    ``known_problems``."""

    def __init__(
        self,
        descriptor: Descriptor,
        problem: Problem,
        device: Device,
        built: Built | Callable[[], Built],
        note: str = "",
        known: KnownLaunches | None = None,
    ) -> None:
        """``built``: what was chosen, and its launches; or a function, called where they are first
        asked for."""
        vars(self).update(
            descriptor=descriptor,
            problem=problem,
            device=device,
            note=note,
            known=known,
            _given=built,
        )

    @cached_property
    def _built(self) -> Built:
        given: Built | Callable[[], Built] = vars(self)["_given"]
        return given() if callable(given) else given

    @property
    def choice(self) -> Choice:
        """What was chosen, and what else could compute it."""
        return self._built[0]

    @property
    def parts(self) -> PlanParts:
        """The launches and their workspace, as the implementation built them."""
        return self._built[1]

    @property
    def implementation(self) -> str:
        """The chosen implementation's name."""
        return self.choice.implementation.name

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        """A call's launches, in order."""
        return tuple(s.record for s in self.parts.steps)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that a call needs in addition to its operands."""
        return (self.known or self.parts).workspace_bytes

    @property
    def workspace_alignment(self) -> int:
        """Bytes that the workspace's address is a multiple of."""
        return (self.known or self.parts).workspace_alignment

    @property
    def zeroed_bytes(self) -> int:
        """Of the workspace, how many must be zero before the first call."""
        return (self.known or self.parts).zeroed_bytes

    @property
    def allocation_bytes(self) -> int:
        """Bytes to allocate, at a multiple of 16, to hold an aligned workspace: see
        ``align_workspace``."""
        need, alignment = self.workspace_bytes, self.workspace_alignment
        return need + alignment - WORKSPACE_ALIGNMENT if need else 0

    def align_workspace(self, address: int) -> int:
        """The aligned workspace within ``allocation_bytes`` bytes from an address on."""
        alignment = self.workspace_alignment
        return -(-address // alignment) * alignment

    @property
    def zeroing(self) -> Step | None:
        """The memset of the workspace's first bytes to 0, where the launches need it."""
        size = self.zeroed_bytes
        return MemsetStep(self.device, 0, size) if size else None

    @property
    def traced_problem(self) -> TracedProblem:
        """As a trace records it."""
        return TracedProblem(self.problem, self.device, self.implementation, self.choice.variant)

    def contents_check(self, resolved: Resolved, runtime: Runtime) -> Callable[[], None] | None:
        """A check of the addresses, lengths, offsets and block tables in memory, which raises
        InvalidValue where they point outside of it; None where the problem has none."""
        check = getattr(self.descriptor, "check_device", None)
        return None if check is None else partial(check, resolved, runtime, self.device)

    def bind(self, *, workspace: object = None, check: bool = False, **operands: object) -> Call:
        """Bind the plan to these operands; those not named come from the descriptor.

        ``workspace``: an array or address of at least ``workspace_bytes``, a multiple of
        ``parts.workspace_alignment``, that overlaps no operand; allocated where it is None. Where
        the plan needs its first bytes to be zero, they are set here, which synchronises: do not
        bind during graph capture.

        ``check=True``, for tests, also reads device memory that holds addresses, lengths, offsets
        or block tables, here and before every launch (as is always done on the host), and raises
        InvalidValue where they point outside of memory. It also compares every result with the
        float64 oracle (a sample of rows where the result is large); a call then raises WrongResult
        naming implementation, device and worst element. Both synchronise and copy to the host, so
        that such a call cannot be captured in a graph.

        Raises InvalidValue for null or misaligned addresses, a wrong device, an unknown or missing
        name, an output or a workspace that overlaps an operand, and, with ``check=True``, a problem
        whose results the oracle cannot compute.
        """
        if not isinstance(check, bool | np.bool_):
            raise InvalidValue("check", check, "must be True or False", "Pass a bool")
        return Call(self, workspace, bool(check), operands)

    def bound(
        self,
        resolved: Resolved,
        runtime: Runtime,
        workspace: Callable[[], int],
        *,
        check: bool = False,
        shared: bool = False,
    ) -> BoundLaunches:
        """The launches bound to these addresses; the device must be current.

        ``workspace()``: the address of at least ``workspace_bytes``, called once the operands are
        checked. ``shared``: others may write to the workspace between two runs, so that bytes that
        must start as zero are set in each run. ``check``: also read device memory that holds
        addresses, lengths, offsets or tables, as is always done on the host. Raises InvalidValue
        for null, misaligned and overlapping addresses, and for contents that point outside of
        memory; PluginError where a step's ``bind`` raises or returns no function.
        """
        address = None
        if (known := self.known) is not None and not (check or shared or self.device.is_host):
            address = workspace()
            check_workspace_address(address, self.workspace_bytes, self.workspace_alignment)
            known_launches = known.bind(resolved.pointers, address)
            if known_launches is not None:
                return BoundLaunches(lambda: self.parts.steps, known_launches, address)
        check_operands(self.problem.operands, resolved)
        check_contents = None
        # Reading host memory needs no synchronisation.
        if check or self.device.is_host:
            check_contents = self.contents_check(resolved, runtime)
            if check_contents is not None:
                check_contents()
        if address is None:
            address = workspace()
            check_workspace_address(address, self.workspace_bytes, self.workspace_alignment)
        steps = self.parts.steps
        if shared and (zeroing := self.zeroing) is not None:
            steps = (zeroing, *steps)
        launches = tuple(
            [bound_step(self.implementation, s, resolved.pointers, address) for s in steps]
        )
        return BoundLaunches(steps, launches, address, check_contents)

    def __copy__(self) -> Plan:
        return self  # immutable

    def __reduce_ex__(self, protocol: object) -> Any:
        raise copy_error(
            "a plan", "Plan the descriptor again, which is cheap while its plan is cached"
        )


_CHECKED = (
    "check=True copies operands to the host, which synchronises",
    "Bind without check, or launch outside of the capture",
)
_ZEROED = (
    "binding this plan sets the start of its workspace to 0 and synchronises",
    "Bind before the capture",
)


class Call:
    """A plan bound to memory. Calling it only launches.

    All its launches use one workspace and write the same outputs. So it serves one thread and one
    stream at a time: a second thread that calls it meanwhile gets CallInUse, and a second stream
    must wait for the first, by an event or by synchronising (this is not checked). ``rebind``
    gives a call with its own workspace.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_bound",
        "_check",
        "_check_contents",
        "_count_writes",
        "_keep",
        "_launches_only",
        "_operands",
        "_owned_workspace",
        "_pointers",
        "_run",
        "_runtime",
        "_stream",
        "_token",
        "_workspace",
        "plan",
    )

    def __init__(
        self, plan: Plan, workspace: object, check: bool, operands: Mapping[str, object]
    ) -> None:
        if check:
            verifier().require_supported(plan.problem)
        self.plan = plan
        self._operands = {**plan.descriptor.operands(), **operands}
        self._workspace, self._check = workspace, check
        self._token: list[None] = [None]  # taken while a thread runs the call
        runtime = plugins().backend(plan.device.backend).runtime
        self._runtime = runtime
        with runtime.activate(plan.device):
            zeroing = plan.zeroing
            if check or zeroing is not None:
                refuse_capture(runtime, plan.device, *(_CHECKED if check else _ZEROED))
            resolved = plan.descriptor.resolve(self._operands, runtime, plan.device)
            self._arrays = resolved.arrays
            first = self._arrays[0] if self._arrays else None
            state = call_state(runtime, plan.device, first)
            self._stream = state.current_stream
            bound = plan.bound(
                resolved, runtime, lambda: self._bind_workspace(resolved), check=check
            )
            # once: the launches reset the bytes that they use
            if zeroing is not None:
                zeroing.bind({}, bound.workspace)(self.stream_handle(None))
                runtime.synchronize(plan.device)
        self._check_contents = bound.check_contents
        checks = check or self._check_contents is not None
        # asked at every call: whether its device is current, and there is nothing to check
        self._launches_only: Callable[[], bool] = (lambda: False) if checks else state.is_current
        self._run, self._count_writes = bound.run, None
        if tensors := _written_tensors(plan, self._operands):
            self._count_writes = partial(torch_arrays.version_incrementer(), tensors)
        bound.plans = (plan,)
        self._bound = bound
        self._keep, self._pointers = resolved.keep, resolved.pointers

    def _bind_workspace(self, resolved: Resolved) -> int:
        """The address of the caller's workspace, else of a new one."""
        plan, workspace = self.plan, self._workspace
        if workspace is None:
            if not plan.workspace_bytes:
                return 0
            first = self._arrays[0] if self._arrays else None
            allocated = allocate(plan.allocation_bytes, plan.device, self._runtime, first)
            self._owned_workspace = allocated.owner
            return plan.align_workspace(allocated.pointer)
        address = workspace_address(workspace, plan.workspace_bytes, plan.device)
        if plan.workspace_bytes:
            runtime = self._runtime if self._check else None
            check_workspace(
                plan.descriptor, plan.problem, plan.workspace_bytes, address, resolved, runtime
            )
        return address

    def __call__(self, stream: object = None) -> None:
        """Launch on a stream: an int handle, an object with ``__cuda_stream__``, or None, the array
        library's current one. Allocates nothing and does not synchronise, unless it was bound with
        ``check=True``.

        Raises CallInUse while another thread runs it.
        """
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = self.stream_handle(stream)
        token = self._token
        try:
            # atomic, at a third of a lock's cost; a signal handler runs before it or in the try
            del token[0]
        except IndexError:
            raise CallInUse(self.plan.problem, self.plan.device) from None
        try:
            if self._launches_only():
                self._run(handle)
                if (count_writes := self._count_writes) is not None:
                    count_writes()
                if traced := active():
                    self._bound.record(traced)
            else:
                self._launch(handle)
        finally:
            token.append(None)

    def _launch(self, handle: int) -> None:
        """The general path: make the device current, check contents and results where asked to."""
        if self._check:
            refuse_capture(self._runtime, self.plan.device, *_CHECKED, stream=handle)
        # memory may have changed since the call was bound
        if self._check_contents is not None:
            with self._runtime.activate(self.plan.device):
                self._check_contents()
        verification = None
        if self._check:
            verification = verifier().verification(self.plan, self._pointers, self._runtime)
        with self._runtime.activate(self.plan.device):
            self.launcher()(handle)
        self._bound.record(active())
        if verification is not None:
            verification.require()

    def stream_handle(self, stream: object) -> int:
        """The integer handle of a stream as ``__call__`` takes it."""
        return stream_handle(
            stream, self._runtime, self.plan.device, self._arrays[0] if self._arrays else None
        )

    def launcher(self) -> Callable[[int], None]:
        """``launch(handle)`` for timing loops of one thread: the same launches, without checks and
        stream lookup."""
        run, count_writes = self._run, self._count_writes
        if count_writes is None:
            return run

        def launch(handle: int) -> None:
            run(handle)
            count_writes()

        return launch

    def rebind(self, *, workspace: object = None, **operands: object) -> Call:
        """A call of the same plan over other memory; operands not named stay. It allocates its own
        workspace, unless this call was bound with the caller's: then that is used again unless
        ``workspace`` gives another."""
        return Call(
            self.plan,
            self._workspace if workspace is None else workspace,
            self._check,
            {**self._operands, **operands},
        )

    def __copy__(self) -> Call:
        return self  # a copy would share its workspace

    def __reduce_ex__(self, protocol: object) -> Any:
        raise copy_error("a call", "Bind its plan to other memory with call.rebind(…)")


def _written_tensors(plan: Plan, operands: Mapping[str, object]) -> tuple[object, ...]:
    """The torch tensors, alone or in lists, that a call over these operands writes."""
    names = {rule.name for rule in plan.problem.operands if rule.written}
    matrix = getattr(getattr(plan.descriptor, "lists", plan.descriptor), "matrix", None)
    written: list[object] = []
    for name, value in operands.items():
        if name in names:
            written.append(value)
        elif matrix is not None and isinstance(value, list | tuple) and matrix(name).written:
            written += cast(Sequence[object], value)
    arrays = (x.owner if isinstance(x, ArrayInfo) else x for x in written)
    return tuple(x for x in arrays if torch_arrays.is_tensor(x))
