"""What every operation on arrays does: views, one device, remembered plans, launches, results of
the caller's kind.

The first call on arrays of certain layouts is checked, described and planned. The planned call is
remembered by its signature, which is everything but the arrays' memory, so that the next such call
asks for views and launches. What depends on addresses is checked whenever they are new. A repeated
call on torch's tensors takes a shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kernelseam.arrays import describe, runtime_of, same_device, tell_written
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dispatch import check_backend, name_of, preferred_backend
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops import planned_call
from kernelseam.ops.planned_call import (
    BoundBy,
    Infos,
    PlannedCall,
    PlannedLaunch,
    Result,
    layout_of,
    new_array,
)
from kernelseam.ops.shortcut import Shortcut
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.traced import hand_over, stands_for_others


class Signatures:
    """Planned calls by their signature, which is everything of them but memory, and bound launches
    by addresses. No array is kept: a workspace is each call's own, of whichever thread and
    stream."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, PlannedCall] = {}
        self.bound: BoundBy = {}
        self.shortcuts: dict[Hashable, Shortcut] = {}
        self.read: torch_arrays.Reader | None = None
        """How tensors are read; None before the first shortcut."""


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
                    results = shortcut.call(pointers, arrays, stream, memory.bound)
                    if results is not None:
                        return results
        return _planned(work, arrays, options, wanted, implementation, stream)
    except InvalidValue as e:
        raise wording.told(e) from None


# What torch's Dynamo follows in its place when it compiles a caller: asking at each call whether
# something compiles would cost all calls.
operate._torchdynamo_inline = hand_over  # type: ignore[attr-defined]


def _planned(
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
    try:
        infos = {name: describe(x, name, wanted) for name, x in arrays.items()}
    except InvalidValue:
        if stands_for_others(arrays.values()):
            return hand_over(work, arrays, options, wanted, implementation, stream)
        raise
    # Types count: what takes 1 may refuse True, which equals it.
    key: Hashable = (
        work,
        wanted,
        implementation,
        options,
        *map(type, options),
        *infos,
        *map(layout_of, infos.values()),
    )
    try:
        known = memory.plans.get(key)
    except Exception:  # an option that cannot be hashed, which the work refuses
        key = known = None
    if known is None or not known.allocate_results(infos):
        _check(infos, wanted)
        operation = Operation(infos, implementation)
        try:
            work(operation, *options)
        except InvalidValue as e:
            raise operation.told(e) from None
        known = operation.planned()
        if operation.repeatable and key is not None:
            if len(memory.plans) >= planned_call.KEPT:
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
    known: PlannedCall,
    infos: Infos,
    own: ArrayInfo | None,
    key: list[object],
    arrays: Mapping[str, object],
) -> None:
    memory.read = read = memory.read or torch_arrays.reader()
    if read is not None and read(arrays.values(), key) is not None:
        if len(memory.shortcuts) >= planned_call.KEPT:
            memory.shortcuts.clear()
        memory.shortcuts[tuple(key)] = Shortcut(known, infos, own)


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
    """A call while it is planned: the arrays that it has, those that it allocates, what it will
    launch."""

    def __init__(self, infos: Infos, implementation: str | None) -> None:
        self.infos, self.implementation = infos, implementation
        self.repeatable = True
        """Whether the same launches compute the next call, over its own addresses."""
        self._results: list[Result] = []
        self._launches: list[PlannedLaunch] = []
        self._options: dict[str, str] = {}

    def fresh(
        self, name: str, shape: Sequence[int], dtype: DType, like: str, option: str = ""
    ) -> None:
        """Make an array for a result, on the device of the one named ``like`` and, where its
        runtime makes them, of its kind. ``option``: which names its dtype."""
        self._options[name] = option
        self.infos[name] = made = new_array(name, shape, dtype, self.infos[like])
        self._results.append(Result(name, tuple(shape), dtype, like, layout_of(made)))

    def launch(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Callable[[], Any],
        names: Mapping[str, str] | None = None,
        told: Callable[[InvalidValue], InvalidValue] | None = None,
    ) -> None:
        """Plan what ``descriptor()`` describes, to be launched when all is planned.

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
            PlannedLaunch(made, tuple([rules[name] for name in operands]), arrays, told)
        )

    def launch_lists(
        self, operands: Mapping[str, ArrayInfo], descriptor: Any, names: Mapping[str, str]
    ) -> None:
        """Plan and bind a descriptor over lists of addresses of matrices, to be launched when all
        is planned, once: the lists are of these arrays' memory alone. ``operands``: the arrays
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
        self._launches.append(PlannedLaunch(made, tuple(rules), arrays, None, made.bind()))

    def told(self, error: InvalidValue) -> InvalidValue:
        """A refusal of a result that was made, as one of the option that it was made by."""
        if not (option := self._options.get(error.field)):
            return error
        return InvalidValue(
            option, self.infos[error.field].dtype, error.rule, "Name another, or leave it out"
        )

    def planned(self) -> PlannedCall:
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
        return PlannedCall(
            tuple(self._results),
            tuple(self._launches),
            device,
            runtime,
            max((x.plan.workspace_room for x in planned), default=0),
            len(planned) < len(self._launches),
            tuple(n for n in dict.fromkeys(outputs) if n not in made),
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
