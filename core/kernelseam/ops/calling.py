"""What all operations on arrays share: views, the device check, cached plans, launches, results.

The first call on arrays of given layouts is checked, described and planned. The planned call is
cached by its signature, which is everything but the arrays' memory, so that a repeated call only
makes views and launches. New addresses are always checked. A repeated call on torch tensors takes a
shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kernelseam.arrays import describe, mark_written, runtime_of, same_device
from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dispatch import check_backend, check_name, preferred_backend
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops import planned_call
from kernelseam.ops.planned_call import (
    BoundLaunches,
    Infos,
    PlannedCall,
    PlannedLaunch,
    Result,
    layout_of,
    new_array,
)
from kernelseam.ops.shortcut import Shortcut, Shortcuts
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.traced import hand_over, recorded, stands_for_others


class CallCache:
    """Planned calls by signature (everything of a call but memory) and bound launches by addresses.

    The cache holds no arrays. Every call allocates its own workspace, so that threads and streams
    share none."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, PlannedCall] = {}
        self.bound: BoundLaunches = {}
        self.shortcuts = Shortcuts()


_DEFAULT_WORDING = Wording()


def operate(
    compute: Callable[..., None],
    arrays: Mapping[str, object],
    options: tuple[Any, ...],
    backend: str | None,
    implementation: str | None,
    stream: object,
    wording: Wording = _DEFAULT_WORDING,
) -> dict[str, Any]:
    """Run an operation on arrays of one device, which must be of the requested backend.

    ``compute(operation, *options)`` declares results and launches. It may read the options, which
    are scalars, and the views ``operation.infos``, and nothing else: it does not run again for
    arrays of the same layouts. ``wording`` names operands in errors as the caller does.

    Returns the allocated results by name, each an array of the library of the array that it is
    like.
    """
    try:
        backend_name = preferred_backend(backend)
        types = tuple(map(type, options))  # as 1 == True
        signature = (compute, backend_name, implementation, options, types, *arrays)
        cache: CallCache | None = plugins().caches.get(CallCache)
        if cache is not None and (addresses := cache.shortcuts.addresses) is not None:
            tensors = tuple(arrays.values())
            if (pointers := addresses(tensors)) is not None:
                shortcut = cache.shortcuts.find(signature, tensors, pointers)
                if shortcut is not None:
                    results = shortcut.call(pointers, tensors, stream, cache.bound)
                    if results is not None:
                        return results
        return _run_planned(
            signature, compute, arrays, options, backend_name, implementation, stream
        )
    except InvalidValue as e:
        raise wording.reworded(e) from None


# What torch's Dynamo follows in its place when it compiles a caller: asking at each call whether
# something compiles would cost all calls.
operate._torchdynamo_inline = hand_over  # type: ignore[attr-defined]


def _run_planned(
    signature: tuple[object, ...],
    compute: Callable[..., None],
    arrays: Mapping[str, object],
    options: tuple[Any, ...],
    backend_name: str | None,
    implementation: str | None,
    stream: object,
) -> dict[str, Any]:
    if recorded(arrays.values()):
        return hand_over(compute, arrays, options, backend_name, implementation, stream)
    current = plugins()
    cache = current.cache_of(CallCache)
    if backend_name is not None:
        current.backend(backend_name)
    if implementation is not None:
        check_name("implementation", implementation)
    try:
        infos = {name: describe(x, name, backend_name) for name, x in arrays.items()}
    except InvalidValue:
        if stands_for_others(arrays.values()):
            return hand_over(compute, arrays, options, backend_name, implementation, stream)
        raise
    key: Hashable = (*signature, *map(layout_of, infos.values()))
    try:
        planned = cache.plans.get(key)
    except Exception:  # an option that cannot be hashed, which ``compute`` refuses
        key = planned = None
    if planned is None or not planned.allocate_results(infos):
        _check_arrays(infos, backend_name)
        operation = Operation(infos, implementation)
        try:
            compute(operation, *options)
        except InvalidValue as e:
            raise operation.reword(e) from None
        planned = operation.planned()
        if operation.repeatable and key is not None:
            if len(cache.plans) >= planned_call.MAX_ENTRIES:
                cache.plans.clear()
                cache.bound.clear()
            cache.plans[key] = planned
    workspace = planned.run(infos, stream, cache.bound)
    for name in planned.written:
        mark_written(infos[name])
    if key is not None and planned.allows_shortcut(infos, workspace):
        cache.shortcuts.add(
            signature, tuple(arrays.values()), lambda: Shortcut(planned, infos, workspace)
        )
    return {
        r.name: to_callers_library(infos[r.name], infos[r.like], stream) for r in planned.results
    }


def _check_arrays(infos: Infos, backend_name: str | None) -> None:
    check_backend(backend_name, same_device(infos))
    for name, info in infos.items():
        if min(info.strides, default=0) < 0 and 0 not in info.shape:
            raise InvalidValue(
                name,
                f"strides {list(info.strides)}",
                "must not be negative",
                "Copy the array first",
            )


class Operation:
    """A call while it is planned: its arrays, the results that it allocates, its launches."""

    def __init__(self, infos: Infos, implementation: str | None) -> None:
        self.infos, self.implementation = infos, implementation
        self.repeatable = True
        """Whether the planned call can serve later calls, over other addresses."""
        self._results: list[Result] = []
        self._launches: list[PlannedLaunch] = []
        self._options: dict[str, str] = {}

    def new_result(
        self, name: str, shape: Sequence[int], dtype: DType, like: str, option: str = ""
    ) -> None:
        """Allocate an array for a result on the device of the array named ``like``, of the same
        library where possible. ``option``: the option that sets its dtype, for errors."""
        self._options[name] = option
        self.infos[name] = info = self.new_array(name, shape, dtype, self.infos[like])
        self._results.append(Result(name, tuple(shape), dtype, like, layout_of(info)))

    def new_array(
        self, name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo
    ) -> ArrayInfo:
        """The array for a result."""
        return new_array(name, shape, dtype, like)

    def launch(
        self,
        operands: Mapping[str, ArrayInfo],
        descriptor: Callable[[], Any],
        names: Mapping[str, str] | None = None,
        reword: Callable[[InvalidValue], InvalidValue] | None = None,
    ) -> None:
        """Plan ``descriptor()``; it is launched once the whole call is planned.

        ``operands``: views by their names in the descriptor, each starting at the first element of
        one of the arrays. ``names``: those arrays' names where they differ. ``reword``: turns an
        error about addresses into one with the caller's names.
        """
        # A cached plan must not keep anyone's memory alive.
        bare = descriptor().without_arrays()
        new_plan = plan(
            bare, device=next(iter(operands.values())).device, implementation=self.implementation
        )
        rules = {rule.name: rule for rule in new_plan.problem.operands}
        arrays = tuple([(names or {}).get(name, name) for name in operands])
        self._launches.append(
            PlannedLaunch(new_plan, tuple([rules[name] for name in operands]), arrays, reword)
        )

    def launch_lists(
        self, operands: Mapping[str, ArrayInfo], descriptor: Any, names: Mapping[str, str]
    ) -> None:
        """Plan and bind a descriptor over lists of matrix addresses, for this call only: the lists
        hold addresses of these arrays. ``operands``: the arrays that contain the matrices; C is
        written."""
        self.repeatable = False
        new_plan = plan(
            descriptor,
            device=next(iter(operands.values())).device,
            implementation=self.implementation,
        )
        rules = [
            OperandRule(n, x.dtype, x.shape, x.strides, 1, written=n == "C")
            for n, x in operands.items()
        ]
        arrays = tuple([names.get(name, name) for name in operands])
        self._launches.append(PlannedLaunch(new_plan, tuple(rules), arrays, None, new_plan.bind()))

    def reword(self, error: InvalidValue) -> InvalidValue:
        """An error about a new result, as one about the option that set its dtype."""
        if not (option := self._options.get(error.field)):
            return error
        return InvalidValue(
            option, self.infos[error.field].dtype, error.rule, "Name another, or leave it out"
        )

    def planned(self) -> PlannedCall:
        """The part of the call that is cached."""
        device = next(iter(self.infos.values())).device
        runtime, planned = (
            plugins().backend(device.backend).runtime,
            [x for x in self._launches if x.call is None],
        )
        new = {r.name for r in self._results}
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
            max((x.plan.allocation_bytes for x in planned), default=0),
            len(planned) < len(self._launches),
            tuple(n for n in dict.fromkeys(outputs) if n not in new),
        )


def check_rank(name: str, info: ArrayInfo, axes: Sequence[str]) -> None:
    """Raise InvalidValue unless the array has as many axes as ``axes`` (names, for the message)."""
    if len(info.shape) != len(axes):
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must have {len(axes)} axes, [{', '.join(axes)}]",
            "Add or remove axes with reshape",
        )


def unexpanded_shape(info: ArrayInfo) -> tuple[int, ...]:
    """An array's shape with extent 1 along every axis of stride 0 (as torch.expand makes them). An
    empty array's shape stays."""
    if 0 in info.shape:
        return info.shape
    return tuple(1 if s == 0 else n for n, s in zip(info.shape, info.strides, strict=True))


def not_none(**arrays: object) -> dict[str, object]:
    """The arrays that are not None."""
    return {name: x for name, x in arrays.items() if x is not None}


def to_callers_library(result: ArrayInfo, like: ArrayInfo, stream: object) -> object:
    """The result as an array of ``like``'s library where that library accepts it, else of its
    runtime's own."""
    if result.kind == like.kind:
        return result.owner
    space = getattr(like.owner, "__array_namespace__", None)
    if space is None:
        return result.owner
    if stream is not None:
        # the library does not order its own streams after this one
        runtime_of(result).synchronize(result.device)
    library = space()
    if result.dtype is DType.bfloat16:  # NumPy does not export it by DLPack
        return library.asarray(result.owner)
    return library.from_dlpack(result.owner)
