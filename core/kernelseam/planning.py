"""Plans and calls: a problem made ready for one device, then bound to memory, then launched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from kernelseam.arrays import describe
from kernelseam.contract import (
    HOST,
    WORKSPACE_ALIGNMENT,
    ArrayInfo,
    Device,
    LaunchRecord,
    OperandRule,
    PlanParts,
    Problem,
    QuickRuntime,
    Ready,
    Runtime,
    Step,
)
from kernelseam.dispatch import (
    Choice,
    build,
    check_backend,
    find_device,
    name_of,
    preferred_backend,
    select,
)
from kernelseam.dtypes import DType
from kernelseam.errors import CallInUse, InvalidValue, UnknownName, not_copied
from kernelseam.forking import cached_property, new_lock
from kernelseam.interop import torch as torch_arrays
from kernelseam.memset import MemsetStep
from kernelseam.plugins import plugins
from kernelseam.trace import active

if TYPE_CHECKING:
    from kernelseam.oracle.verification import Verification


class Descriptor(Protocol):
    """What ``plan`` wants of a descriptor."""

    def problem(self) -> Problem:
        """The hashable part, without pointers."""

    def operands(self) -> dict[str, object]:
        """Pointers or arrays by operand name; those not given are absent."""

    def simplified(self) -> tuple[Descriptor, str]:
        """An equal descriptor that is cheaper to serve, and a note saying so; itself and "" where
        there is none."""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Operands as a person gave them → addresses, and whatever must stay alive with them."""


@dataclass(frozen=True)
class Resolved:
    """Addresses by operand name, and what keeps them valid."""

    pointers: dict[str, int]
    keep: tuple[object, ...]
    arrays: tuple[ArrayInfo, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A list of launches over one workspace, for one problem on one device. Immutable and
    thread-safe."""

    descriptor: Descriptor
    problem: Problem
    device: Device
    choice: Choice
    parts: PlanParts
    note: str = ""

    @property
    def implementation(self) -> str:
        """The chosen implementation's name."""
        return self.choice.implementation.name

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that a call needs beside its operands."""
        return self.parts.workspace_bytes

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

    def over(
        self, addresses: dict[str, int], workspace: int = 0
    ) -> tuple[Callable[[int], None], ...]:
        """Its launches over these addresses of arrays that it was made for, checked as ``bind``
        checks them; the device must be current. ``workspace``: the address of at least
        ``workspace_bytes``."""
        found = Resolved(addresses, ())
        if self.device.evidence == HOST:
            runtime = plugins().backend(self.device.backend).runtime
            found = self.descriptor.resolve(addresses, runtime, self.device)
            if (contents := self.contents_check(found, runtime)) is not None:
                contents()
        check_operands(self.problem.operands, found, self.device)
        place = _workspace_address(workspace, self.parts)
        return tuple([s.bind(found.pointers, place) for s in self._steps_over])

    @property
    def launches_over(self) -> tuple[LaunchRecord, ...]:
        """What the launches of ``over`` are, in order."""
        return tuple(s.record for s in self._steps_over)

    @cached_property
    def _steps_over(self) -> tuple[Step, ...]:
        """What must start as zeros is set each time: the workspace's owner may use it between two
        calls."""
        return (*self._zeroing, *self.parts.steps)

    @property
    def _zeroing(self) -> tuple[Step, ...]:
        return (
            (MemsetStep(self.device, 0, self.parts.zeroed_bytes),)
            if self.parts.zeroed_bytes
            else ()
        )

    @property
    def workspace_room(self) -> int:
        """Bytes to allocate, aligned to 16, so that an aligned workspace lies among them: see
        ``workspace_in``."""
        need, alignment = self.parts.workspace_bytes, self.parts.workspace_alignment
        return need + alignment - WORKSPACE_ALIGNMENT if need else 0

    def workspace_in(self, address: int) -> int:
        """The workspace's address in ``workspace_room`` bytes from an address on."""
        alignment = self.parts.workspace_alignment
        return -(-address // alignment) * alignment

    def __copy__(self) -> Plan:
        return self  # nothing of it changes

    def __reduce_ex__(self, protocol: object) -> Any:
        raise not_copied(
            "a plan", "Plan the descriptor again, which is cheap where it was planned before"
        )

    def contents_check(self, found: Resolved, runtime: Runtime) -> Callable[[], None] | None:
        """What reads the addresses, lengths, offsets and block tables in memory, and raises
        InvalidValue where they leave it; None where a problem has none of them."""
        check = getattr(self.descriptor, "check_device", None)
        return None if check is None else partial(check, found, runtime, self.device)


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
            check_operands(plan.problem.operands, resolved, plan.device)
            # The host reads its own memory without waiting for anything.
            reads = check or plan.device.evidence == HOST
            self._check_device = plan.contents_check(resolved, runtime) if reads else None
            self._only_launches = self._check_device is None and not check
            if self._check_device is not None:
                self._check_device()
            self._arrays = resolved.arrays
            ready = ready_of(runtime, plan.device, self._arrays[0] if self._arrays else None)
            self._is_current, self._stream = ready.is_current, ready.current_stream
            address = self._take_workspace(workspace)
            if workspace is not None and plan.workspace_bytes:
                check_workspace(plan, address, resolved, runtime if check else None)
            self._launches: list[Callable[[int], object]] = [
                s.bind(resolved.pointers, address) for s in plan.parts.steps
            ]
            # once: what this call's launches find there they leave there
            for step in plan._zeroing:
                step.bind({}, address)(self.stream_handle(None))
                runtime.synchronize(plan.device)
        if tensors := _written_tensors(plan, self._given):
            tell = torch_arrays.teller()
            self._launches.append(lambda handle: tell(tensors))
        self._records = plan.launches
        self._keep, self._pointers = resolved.keep, resolved.pointers

    def _take_workspace(self, workspace: object) -> int:
        need = self.plan.workspace_bytes
        if workspace is None:
            if not need:
                return 0
            room = self.plan.workspace_room
            # Of the operands' library, so that its streams and graphs know of it.
            like = self._arrays[0] if self._arrays else None
            self._owned_workspace = self._runtime.empty(
                (-(-room // 4),), DType.float32, self.plan.device, like
            )
            owned = self._runtime.describe(self._owned_workspace)
            assert owned is not None
            return _workspace_address(self.plan.workspace_in(owned.pointer), self.plan.parts)
        if isinstance(workspace, int):
            return _workspace_address(workspace, self.plan.parts)
        info = describe(workspace, "workspace", self.plan.device.backend)
        if info.device != self.plan.device:
            raise InvalidValue(
                "workspace",
                f"an array on {info.device}",
                f"must lie on {self.plan.device}",
                "Allocate it there",
            )
        size = info.dtype.itemsize
        for n, s in zip(reversed(info.shape), reversed(info.strides), strict=True):
            if (n > 1 and s * info.dtype.itemsize != size) or not info.writable:
                raise InvalidValue(
                    "workspace",
                    f"strides {list(info.strides)}" if info.writable else "a read-only array",
                    "must be contiguous and writable",
                    "Allocate one, or leave it out",
                )
            size *= n
        if size < need:
            raise InvalidValue(
                "workspace",
                f"{size} bytes",
                f"must have at least {need} bytes",
                "See plan.workspace_bytes",
            )
        return _workspace_address(info.pointer, self.plan.parts)

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
        checked = self._verification() if self._check else None
        with self._runtime.activate(self.plan.device):
            for launch in self._launches:
                launch(handle)
        self._trace(active())
        if checked is not None:
            checked.require()

    def _trace(self, traced: Sequence[list[LaunchRecord]]) -> None:
        for records in traced:
            records.extend(self._records)

    def _verification(self) -> Verification:
        from kernelseam.oracle.verification import Verification

        return Verification(self.plan, self._pointers, self._runtime)

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


def ready_of(runtime: Runtime, device: Device, array: ArrayInfo | None) -> Ready:
    """What a runtime has ready for calls on a device; where it has nothing, ``activate`` is always
    asked for."""
    if isinstance(runtime, QuickRuntime):
        return runtime.ready(device, array.kind if array else None)
    return Ready(lambda: False, partial(runtime.current_stream, device, array))


def stream_handle(
    stream: object, runtime: Runtime, device: Device, array: ArrayInfo | None = None
) -> int:
    """The integer handle of a stream: an int, an object with ``__cuda_stream__``, or None, the
    array library's current one. Raises InvalidValue for anything else."""
    if stream is None:
        return runtime.current_stream(device, array)
    handle = stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        found = protocol() if callable(protocol) else protocol
        handle = found[1] if isinstance(found, tuple | list) and len(found) == 2 else None
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 2**64:
        raise InvalidValue(
            "stream",
            repr(stream) if isinstance(stream, str) else stream,
            "must be an int, an object with __cuda_stream__, or None",
            "Pass the stream's integer handle",
        )
    return handle


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


def _workspace_address(address: int, parts: PlanParts) -> int:
    if parts.workspace_bytes and (address <= 0 or address % parts.workspace_alignment):
        raise InvalidValue(
            "workspace",
            hex(address),
            f"must be the address of memory, a multiple of {parts.workspace_alignment} bytes",
            "Align it, or leave it out",
        )
    return address


def check_operands(rules: tuple[OperandRule, ...], resolved: Resolved, device: Device) -> None:
    """Null, misaligned and overlapping addresses, refused by name."""
    for rule in rules:
        pointer = resolved.pointers.get(rule.name)
        if pointer is None or (pointer == 0 and rule.span):
            if pointer is None and (rule.optional or not rule.span):
                continue
            raise InvalidValue(
                rule.name,
                "null" if pointer == 0 else "missing",
                "must be the address of memory on the device",
                f"Give {rule.name} in the descriptor or to bind",
            )
        if rule.span and pointer % rule.alignment:
            raise InvalidValue(
                rule.name,
                hex(pointer),
                f"must be a multiple of {rule.alignment} bytes",
                "Align the array"
                if rule.dtype is None or rule.alignment == rule.dtype.itemsize
                else "Align the array, or put its address into the descriptor before planning, "
                "so that a way without "
                "wide accesses is planned",
            )
    for out in rules:
        if (
            not out.written
            or not out.span
            or out.dtype is None
            or out.name not in resolved.pointers
        ):
            continue
        for other in rules:
            if (
                other is out
                or not other.span
                or other.dtype is None
                or other.name not in resolved.pointers
            ):
                continue
            same = resolved.pointers[out.name] == resolved.pointers[other.name]
            if same and other.may_be == out.name and other.walks_as(out):
                continue
            if proven_overlap(
                resolved.pointers[out.name], out, resolved.pointers[other.name], other
            ):
                raise InvalidValue(
                    out.name,
                    hex(resolved.pointers[out.name]),
                    f"overlaps {other.name}",
                    "Give the output memory of its own",
                )


def check_workspace(plan: Plan, address: int, resolved: Resolved, runtime: Runtime | None) -> None:
    """Refuse a workspace that provably shares memory with an operand, or with a matrix of a list
    that the host knows; given a runtime, also of one on the device."""
    own = OperandRule("workspace", DType.boolean, (plan.workspace_bytes,), (1,), 1, True)
    for rule in plan.problem.operands:
        pointer = resolved.pointers.get(rule.name, 0)
        walked = rule if rule.dtype is not None else replace(rule, dtype=DType.float64)
        if pointer and rule.span and proven_overlap(address, own, pointer, walked):
            raise InvalidValue(
                "workspace", hex(address), f"overlaps {rule.name}", "Give it memory of its own"
            )
    beside = getattr(plan.descriptor, "check_beside", None)
    if beside is not None:
        try:
            beside(resolved, own, address, runtime)
        except InvalidValue as e:
            raise InvalidValue(
                "workspace",
                hex(address),
                f"overlaps the matrix of {e.field}",
                "Give it memory of its own",
            ) from None


class _Memory:
    """Strided memory as NumPy's overlap solver takes it; never read."""

    def __init__(self, pointer: int, rule: OperandRule) -> None:
        assert rule.dtype is not None
        size = rule.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "typestr": f"|V{size}",
            "shape": rule.shape,
            "strides": tuple(s * size for s in rule.strides),
        }


def proven_overlap(x: int, a: OperandRule, y: int, b: OperandRule) -> bool:
    """Whether two strided memories provably share an element; interleaved ones do not."""
    if (
        x + a.span * (a.dtype.itemsize if a.dtype else 8) <= y
        or y + b.span * (b.dtype.itemsize if b.dtype else 8) <= x
    ):
        return False
    try:
        solve: Any = np.shares_memory  # its stub knows only the two special values of max_work
        return bool(solve(np.asarray(_Memory(x, a)), np.asarray(_Memory(y, b)), max_work=100_000))
    except np.exceptions.TooHardError:
        return False


_plans: OrderedDict[Any, PlanParts] = OrderedDict()
_choices: OrderedDict[Any, Choice] = OrderedDict()
_lock = new_lock()
_KEPT = 1024


def forget() -> None:
    """Drop every remembered plan, and what the functions on arrays remember of them."""
    with _lock:
        _plans.clear()
        _choices.clear()
    for other in _forgetting:
        other()


_forgetting: list[Callable[[], None]] = []


def when_forgotten(other: Callable[[], None]) -> None:
    """``forget`` calls that, too."""
    _forgetting.append(other)


def plan(
    descriptor: Descriptor,
    *,
    device: Device | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
) -> Plan:
    """Choose an implementation and build its launches.

    ``device``: a Device or "backend:index"; by default that of the descriptor's arrays, which must
    be of the backend asked for (``backend``, over ``use_backend``, over KERNELSEAM_BACKEND), else
    that backend's first.

    Plans are remembered by problem, device and implementation: asking again is cheap.
    Raises InvalidValue, UnknownName, Unsupported or CompileError.
    """
    if isinstance(descriptor, type) or not hasattr(descriptor, "simplified"):
        raise InvalidValue(
            "descriptor",
            type(descriptor).__name__,
            "must be a descriptor",
            "Fill in one: BatchedGemmStrided, Attention, QkvProjection or another",
        )
    backend, implementation = (
        None if x is None else name_of(n, x)
        for n, x in (("backend", backend), ("implementation", implementation))
    )
    where: Device | None = getattr(descriptor, "device", None) if device is None else None
    descriptor, note = descriptor.simplified()
    problem = descriptor.problem()
    try:
        target = where or find_device(device, backend)
    except UnknownName as e:
        if device is None:
            raise
        raise UnknownName("device", device, e.rule, e.remedy) from None
    if where is not None:
        check_backend(preferred_backend(backend), where)
    elif backend is not None and target.backend != backend:
        raise InvalidValue("backend", backend, f"the device is {target}", "Name one of the two")
    key = (problem, target, implementation)
    with _lock:
        parts, choice = _plans.get(key), _choices.get(key)
    if parts is None or choice is None:
        choice = select(problem, target, implementation)
        choice, parts = build(choice, problem, target, named=implementation is not None)
        with _lock:
            _plans[key], _choices[key] = parts, choice
            while len(_plans) > _KEPT:
                _choices.pop(_plans.popitem(last=False)[0], None)
    return Plan(descriptor, problem, target, choice, parts, note)
