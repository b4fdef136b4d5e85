"""What every operation on arrays does: views, one device, remembered plans, launches, results of
the caller's kind.

The first call on arrays that lie in a certain way is worked out: checked, described, planned. What
it came to is remembered by everything but the arrays' memory, so that the next such call asks for
views and launches. What depends on addresses is checked whenever they are new. A call on torch's
tensors that was made before takes a shortcut: it asks the tensors what they tell of themselves,
makes the results and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelseam.arrays import describe, runtime_of, same_device, tell_written
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Device, OperandRule, QuickRuntime, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dispatch import check_backend, name_of, preferred_backend
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap
from kernelseam.planning import Call, Plan, plan
from kernelseam.planning.binding import Bound, bind, joined
from kernelseam.planning.streams import stream_handle
from kernelseam.planning.workspace import allocate
from kernelseam.plugins import plugins
from kernelseam.trace import active

Infos = dict[str, ArrayInfo]
_BoundBy = dict[Hashable, Bound]


class Signatures:
    """Planned calls by their signature, which is everything of them but memory, and bound launches
    by addresses. No array is kept: a workspace is each call's own, of whichever thread and
    stream."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, _PlannedCall] = {}
        self.bound: _BoundBy = {}
        self.shortcuts: dict[Hashable, _Shortcut] = {}
        self.read: torch_arrays.Reader | None = None
        """How tensors are read; None before the first shortcut."""


_KEPT = 1024
"""Entries of each; where there are as many, all are dropped."""

_AS_IT_IS = Wording()


def operate(
    work: Callable[..., None],
    arrays: Mapping[str, object],
    options: tuple[Any, ...],
    backend: str | None,
    implementation: str | None,
    stream: object,
    wording: Wording = _AS_IT_IS,
) -> dict[str, Any]:
    """Do what ``work(operation, *options)`` says with arrays, which are on one device of the
    backend asked for.

    ``work`` reads the options, which are scalars, and the views ``operation.infos``, and nothing
    else: it is not asked again for arrays that lie the same way. Returns the results that were
    made, by name, as arrays of the library of the array that each is like. What is refused is told
    in the caller's ``wording``.
    """
    try:
        wanted = preferred_backend(backend)
        memory: Signatures | None = plugins().memory.get(Signatures)
        if memory is not None and memory.read is not None:
            key = _key(work, arrays, options, wanted, implementation)
            if (pointers := memory.read(arrays.values(), key)) is not None:
                try:
                    shortcut = memory.shortcuts.get(tuple(key))
                except Exception:  # an option that cannot be hashed, which the work refuses
                    shortcut = None
                if shortcut is not None:
                    made = shortcut.taken(pointers, arrays, stream, memory.bound)
                    if made is not None:
                        return made
        return _operated(work, arrays, options, wanted, implementation, stream)
    except InvalidValue as e:
        raise wording.told(e) from None


def _operated(
    work: Callable[..., None],
    arrays: Mapping[str, object],
    options: tuple[Any, ...],
    wanted: str | None,
    implementation: str | None,
    stream: object,
) -> dict[str, Any]:
    found = plugins()
    memory = found.remembered(Signatures)
    if wanted is not None:
        found.backend(wanted)
    if implementation is not None:
        name_of("implementation", implementation)
    infos = {name: describe(x, name, wanted) for name, x in arrays.items()}
    # Types count: what takes 1 may refuse True, which equals it.
    key: Hashable = (
        work,
        wanted,
        implementation,
        options,
        *map(type, options),
        *infos,
        *map(_lies, infos.values()),
    )
    try:
        known = memory.plans.get(key)
    except Exception:  # an option that cannot be hashed, which the work refuses
        key = known = None
    if known is None or not known.make_results(infos):
        _check(infos, wanted)
        operation = Operation(infos, implementation)
        try:
            work(operation, *options)
        except InvalidValue as e:
            raise operation.told(e) from None
        known = operation.known()
        if operation.repeatable and key is not None:
            if len(memory.plans) >= _KEPT:
                memory.plans.clear()
                memory.bound.clear()
            memory.plans[key] = known
    own = known.run(infos, stream, memory.bound)
    for name in known.written:
        tell_written(infos[name])
    if key is not None and known.quick(infos, own):
        _keep(
            memory, known, infos, own, _key(work, arrays, options, wanted, implementation), arrays
        )
    return {r.name: handed_back(infos[r.name], infos[r.like], stream) for r in known.results}


def _key(
    work: Callable[..., None],
    arrays: Mapping[str, object],
    options: tuple[Any, ...],
    wanted: str | None,
    implementation: str | None,
) -> list[object]:
    """What a reader of tensors adds to. Types count: what takes 1 may refuse True, which equals
    it."""
    return [work, wanted, implementation, options, *map(type, options), *arrays]


def _keep(
    memory: Signatures,
    known: _PlannedCall,
    infos: Infos,
    own: ArrayInfo | None,
    key: list[object],
    arrays: Mapping[str, object],
) -> None:
    memory.read = read = memory.read or torch_arrays.reader()
    if read is not None and read(arrays.values(), key) is not None:
        if len(memory.shortcuts) >= _KEPT:
            memory.shortcuts.clear()
        memory.shortcuts[tuple(key)] = _Shortcut(known, infos, own)


def _lies(info: ArrayInfo) -> tuple[object, ...]:
    """All of an array that shapes a plan."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16 == 0, info.writable


def _check(infos: Infos, wanted: str | None) -> None:
    check_backend(wanted, same_device(infos))
    for name, info in infos.items():
        if min(info.strides, default=0) < 0 and 0 not in info.shape:
            raise InvalidValue(
                name,
                f"strides {list(info.strides)}",
                "must not walk backwards",
                "Copy the array first",
            )


class Operation:
    """A call while it is worked out: the arrays that it has, those that it makes, what it will
    launch."""

    def __init__(self, infos: Infos, implementation: str | None) -> None:
        self.infos, self.implementation = infos, implementation
        self.repeatable = True
        """Whether the same launches compute the next call, over its own addresses."""
        self._results: list[_Result] = []
        self._launches: list[_Launch] = []
        self._options: dict[str, str] = {}

    def fresh(
        self, name: str, shape: Sequence[int], dtype: DType, like: str, option: str = ""
    ) -> None:
        """Make an array for a result, on the device of the one named ``like`` and, where its
        runtime makes them, of its kind. ``option``: which names its dtype."""
        self._options[name] = option
        self.infos[name] = made = _fresh(name, shape, dtype, self.infos[like])
        self._results.append(_Result(name, tuple(shape), dtype, like, _lies(made)))

    def launch(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Callable[[], Any],
        names: Mapping[str, str] | None = None,
        told: Callable[[InvalidValue], InvalidValue] | None = None,
    ) -> None:
        """Plan what ``descriptor()`` describes, to be launched when all is worked out.

        ``operands``: views by their names in the descriptor, each over one of the arrays from its
        first element on. ``names``: those of the arrays where they differ. ``told``: a refusal of
        addresses, in the caller's words.
        """
        # A remembered plan must not keep anyone's memory alive.
        bare = descriptor().without_arrays()
        made = plan(
            bare, device=next(iter(operands.values())).device, implementation=self.implementation
        )
        rules = {rule.name: rule for rule in made.problem.operands}
        arrays = tuple([(names or {}).get(name, name) for name in operands])
        self._launches.append(
            _Launch(made, tuple([rules[name] for name in operands]), arrays, told)
        )

    def launch_lists(
        self, operands: Mapping[str, ArrayInfo], descriptor: Any, names: Mapping[str, str]
    ) -> None:
        """Plan and bind a descriptor over lists of addresses of matrices, to be launched when all
        is worked out, once: the lists are of these arrays' memory alone. ``operands``: the arrays
        that the matrices lie in, C written."""
        self.repeatable = False
        made = plan(
            descriptor,
            device=next(iter(operands.values())).device,
            implementation=self.implementation,
        )
        rules = [
            OperandRule(n, x.dtype, x.shape, x.strides, 1, written=n == "C")
            for n, x in operands.items()
        ]
        arrays = tuple([names.get(name, name) for name in operands])
        self._launches.append(_Launch(made, tuple(rules), arrays, None, made.bind()))

    def told(self, error: InvalidValue) -> InvalidValue:
        """A refusal of a result that was made, as one of the option that it was made by."""
        if not (option := self._options.get(error.field)):
            return error
        return InvalidValue(
            option, self.infos[error.field].dtype, error.rule, "Name another, or leave it out"
        )

    def known(self) -> _PlannedCall:
        """What is to be remembered of it."""
        device = next(iter(self.infos.values())).device
        runtime, planned = (
            plugins().backend(device.backend).runtime,
            [x for x in self._launches if x.call is None],
        )
        made = {r.name for r in self._results}
        outputs = [
            n
            for x in self._launches
            for rule, n in zip(x.rules, x.arrays, strict=True)
            if rule.written
        ]
        return _PlannedCall(
            tuple(self._results),
            tuple(self._launches),
            device,
            runtime,
            max((x.plan.workspace_room for x in planned), default=0),
            len(planned) < len(self._launches),
            tuple(n for n in dict.fromkeys(outputs) if n not in made),
        )


@dataclass(frozen=True)
class _Result:
    """An array that a call makes."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    like: str
    lies: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class _Launch:
    """A plan, how each of its operands is walked, and which array it is."""

    plan: Plan
    rules: tuple[OperandRule, ...]
    arrays: tuple[str, ...]
    told: Callable[[InvalidValue], InvalidValue] | None
    call: Call | None = None
    """Where the plan takes lists of addresses: bound to them."""

    def bind(self, addresses: Mapping[str, int], workspace: int, runtime: Runtime) -> Bound:
        """Its launches over the arrays' addresses, by name, which are checked."""
        if self.call is not None:
            return Bound(self.plan.parts.steps, (self.call.launcher(),))
        pointers = {
            rule.name: addresses[name] for rule, name in zip(self.rules, self.arrays, strict=True)
        }
        try:
            return bind(
                self.plan,
                Resolved(pointers, ()),
                runtime,
                lambda: self.plan.workspace_in(workspace),
                shared=True,
            )
        except InvalidValue as e:
            if self.told is None:
                raise
            raise self.told(e) from None


@dataclass(frozen=True, eq=False)
class _PlannedCall:
    """What a call came to."""

    results: tuple[_Result, ...]
    launches: tuple[_Launch, ...]
    device: Device
    runtime: Runtime
    workspace_bytes: int
    """Of the workspace that the launches use one after the other."""
    waits: bool
    """Whether a launch uses what goes when the call returns."""
    written: tuple[str, ...]
    """The caller's arrays that take results."""

    def make_results(self, infos: Infos) -> bool:
        """Make the results; False, with none made, where one does not lie as the plans have it."""
        for r in self.results:
            infos[r.name] = made = _fresh(r.name, r.shape, r.dtype, infos[r.like])
            if _lies(made) != r.lies:
                for made_before in self.results:
                    infos.pop(made_before.name, None)
                return False
        return True

    def run(self, infos: Infos, stream: object, bound: _BoundBy) -> ArrayInfo | None:
        """Launch everything, once all of it is bound and checked. Returns the workspace, where
        there was one."""
        device, runtime, first = self.device, self.runtime, next(iter(infos.values()))
        need = self.workspace_bytes
        own = allocate(need, device, runtime, first) if need else None
        key: tuple[Any, ...] = (
            self,
            own.pointer if own else 0,
            *[info.pointer for info in infos.values()],
        )
        with runtime.activate(device):
            found = bound.get(key) or self.bound_to(
                {n: i.pointer for n, i in infos.items()}, key, bound
            )
            handle = stream_handle(stream, runtime, device, first)
            found.launch(handle)
        # The library, which takes the workspace back, knows nothing of another stream; nor does
        # anyone of lists.
        if self.waits or (
            own and stream is not None and handle != runtime.current_stream(device, first)
        ):
            runtime.synchronize(device)
        return own

    def bound_to(
        self, addresses: Mapping[str, int], key: tuple[Any, ...], bound: _BoundBy
    ) -> Bound:
        """The launches over these addresses, checked, and remembered by a key whose second is the
        workspace's."""
        found = joined([x.bind(addresses, key[1], self.runtime) for x in self.launches])
        if len(self.launches) > 1:
            _check_apart(self.launches, addresses)
        # On the host lengths and tables are looked at, too, and may change; lists are this call's
        # alone.
        if self.repeats:
            if len(bound) >= _KEPT:
                bound.clear()
            bound[key] = found
        return found

    @property
    def repeats(self) -> bool:
        """Whether bound launches serve the next call over the same memory."""
        return not self.device.is_host and not self.waits

    def quick(self, infos: Infos, own: ArrayInfo | None) -> bool:
        """Whether calls on tensors that lie as these do can take a shortcut: no memory is looked
        at."""
        every = (*infos.values(), *([] if own is None else [own]))
        quick = self.repeats and all(x.kind == "torch" and x.pointer for x in every)
        return quick and isinstance(self.runtime, QuickRuntime)


class _Shortcut:
    """A call on torch's tensors that was worked out, for others that lie the same way: nothing of
    them is described."""

    __slots__ = ("_is_current", "_known", "_makers", "_names", "_stream", "_tell", "_workspace")

    def __init__(self, known: _PlannedCall, infos: Infos, own: ArrayInfo | None) -> None:
        assert isinstance(known.runtime, QuickRuntime)
        self._known, self._names = known, tuple(infos)
        ready = known.runtime.ready(known.device, "torch")
        self._is_current, self._stream = ready.is_current, ready.current_stream
        self._makers = [
            (r.name, torch_arrays.maker(r.shape, r.dtype, infos[r.like].owner))
            for r in known.results
        ]
        self._workspace = (
            None if own is None else torch_arrays.maker(own.shape, own.dtype, own.owner)
        )
        self._tell = torch_arrays.teller()

    def taken(
        self, pointers: list[int], arrays: Mapping[str, object], stream: object, bound: _BoundBy
    ) -> dict[str, Any] | None:
        """The results that were made; None, with nothing launched, where the call must be worked
        out: memory ran out, or lies otherwise. ``pointers``: those of the arrays, in order."""
        known, place, own = self._known, 0, None
        made: dict[str, Any] = {}
        try:
            for name, make in self._makers:
                made[name] = x = make()
                pointers.append(x.data_ptr())
                if not pointers[-1] or pointers[-1] & 15:
                    return None
            if self._workspace is not None:
                own = self._workspace()
                place = own.data_ptr()
        except Exception:  # the runtime, which is asked again, says it in its words
            return None
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = stream_handle(stream, known.runtime, known.device)
        key = (known, place, *pointers)
        found = bound.get(key)
        if found is not None and self._is_current() and not active():
            for launch in found.launches:
                launch(handle)
        else:
            with known.runtime.activate(known.device):
                if found is None:
                    addresses = dict(zip(self._names, pointers, strict=True))
                    found = known.bound_to(addresses, key, bound)
                found.launch(handle)
        # The library, which takes the workspace back, knows nothing of another stream.
        if own is not None and stream is not None and handle != self._stream():
            known.runtime.synchronize(known.device)
        if known.written:
            self._tell(tuple([arrays[name] for name in known.written]))
        return made


def _check_apart(launches: Sequence[_Launch], addresses: Mapping[str, int]) -> None:
    """Refuse a result in memory that a later launch reads or writes as another array; what one
    launch does with its own operands is checked with them."""
    for i, earlier in enumerate(launches):
        for rule, name in zip(earlier.rules, earlier.arrays, strict=True):
            if not rule.written or not rule.span:
                continue
            at = addresses[name]
            for later in launches[i + 1 :]:
                for other, other_name in zip(later.rules, later.arrays, strict=True):
                    if (
                        other_name != name
                        and other.span
                        and proven_overlap(at, rule, addresses[other_name], other)
                    ):
                        when = "" if other.written else ", which is still to be read"
                        raise InvalidValue(
                            name,
                            hex(at),
                            f"overlaps {other_name}{when}",
                            "Give the output memory of its own",
                        )


def rank(name: str, info: ArrayInfo, axes: Sequence[str]) -> None:
    """Refuse an array whose number of axes is not that of ``axes`` (names, for the message)."""
    if len(info.shape) != len(axes):
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must have {len(axes)} axes, [{', '.join(axes)}]",
            "Add or remove axes with reshape",
        )


def once(info: ArrayInfo) -> tuple[int, ...]:
    """An array's shape with extent 1 where it repeats; the strides of an empty one say nothing."""
    if 0 in info.shape:
        return info.shape
    return tuple(1 if s == 0 else n for n, s in zip(info.shape, info.strides, strict=True))


def given(**arrays: object) -> dict[str, object]:
    """Those that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def _fresh(name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo) -> ArrayInfo:
    runtime = runtime_of(like)
    return describe(runtime.empty(shape, dtype, like.device, like), name, like.device.backend)


def handed_back(made: ArrayInfo, like: ArrayInfo, stream: object) -> object:
    """The result as an array of ``like``'s library, where it can take one; else as its runtime made
    it."""
    if made.kind == like.kind:
        return made.owner
    space = getattr(like.owner, "__array_namespace__", None)
    if space is None:
        return made.owner
    if stream is not None:
        # the library's own streams know nothing of this one
        runtime_of(made).synchronize(made.device)
    library = space()
    if made.dtype is DType.bfloat16:  # NumPy does not hand it out by DLPack
        return library.asarray(made.owner)
    return library.from_dlpack(made.owner)
