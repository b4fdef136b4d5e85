"""What all operations on arrays share: views, the device check, planned calls, launches, results.

The first call on arrays of given layouts is checked, described and planned; a later one with the
same layouts only makes views and launches. New addresses are always checked. Calls on torch tensors
take a shorter path where similar ones were planned, even with other extents: see ``road``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import kernelseam.plugins as discovery
from kernelseam.arrays import describe, mark_written, runtime_of, same_device
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dispatch import (
    check_backend,
    check_name,
    chosen_backend,
    in_environment,
    preferred_backend,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.launch_trace import active
from kernelseam.ops.array_call import ArrayCall, BoundCache, Infos, layout_of, put
from kernelseam.ops.on_torch import Zeroed
from kernelseam.ops.operation import ByNumbers, Operation, cleared_in
from kernelseam.ops.road import Caller
from kernelseam.ops.split import SPLITS, split_of
from kernelseam.plugins import plugins
from kernelseam.torch_dispatch import hand_over, recorded, stands_for_others


@dataclass(frozen=True, slots=True)
class Way:
    """The ``caller`` of a signature, and the values of its options that are numbers, ``given``. Of
    torch: ``forward``, the module of forward-mode derivatives; ``modes()``, how many dispatch modes
    are active; ``casts()``, whether autocast is enabled, for which callers convert operands."""

    caller: Caller
    given: tuple[Any, ...]
    forward: Any
    modes: Callable[[], int]
    casts: Callable[[], bool]


class CallCache:
    """Callers by signature, which is all of a call but its tensors and its options that are
    numbers; planned calls by signature and layouts. It holds no arrays but zeroed memory, one block
    a stream. Every call allocates its own workspace, so that threads and streams share none."""

    def __init__(self) -> None:
        self.callers: dict[Hashable, Caller] = {}
        self.addresses: torch_arrays.AddressReader | None = None
        """None before the first caller."""
        self.plans: dict[Hashable, ArrayCall] = {}
        self.bound: BoundCache = {}
        self.ways: dict[Hashable, Way] = {}
        """See ``fast_path``."""
        self.zeroed: Zeroed = {}

    def learn(
        self,
        signature: tuple[Hashable, ...],
        arrays: Mapping[str, object],
        options: tuple[Any, ...],
        infos: Infos,
        planned: ArrayCall,
        workspace: ArrayInfo | None,
        is_new: bool,
    ) -> None:
        """From a call on torch tensors that was planned."""
        self.addresses = self.addresses or torch_arrays.address_reader()
        tensors = tuple(arrays.values())
        pointers = None if self.addresses is None else self.addresses(tensors)
        if pointers is None:
            return
        caller = self.callers.get(signature)
        if caller is None:
            compute, implementation = cast(Any, signature[0]), cast(Any, signature[2])
            caller = Caller(compute, tuple(arrays), implementation, self.zeroed)
            put(self.callers, signature, caller)
        caller.learn(infos, tensors, pointers, options, planned, workspace, is_new)


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
    are scalars or tuples of them, and the views ``operation.infos``, and nothing else: it does not
    run again for arrays like those. ``wording`` names operands in errors as the caller does.

    Returns the allocated results by name, each an array of the library of the array that it is
    like.
    """
    try:
        backend_name = backend
        if not (backend is chosen_backend() is in_environment() is None):
            backend_name = preferred_backend(backend)
        split = SPLITS.get(tuple(map(type, options))) or split_of(options)
        if (numbers := split.numbers) is None:
            given, others = (), options
        else:
            given, others = numbers(options), split.others(options)
        signature = (compute, backend_name, implementation, split, others, *arrays)
        found = discovery._plugins  # plugins(), without a call of a function
        cache: CallCache | None = None if found is None else found.caches.get(CallCache)
        if cache is not None and (addresses := cache.addresses) is not None:
            try:
                caller = cache.callers.get(signature)
            except TypeError:  # an option that cannot be hashed, which ``compute`` refuses
                caller = None
            if caller is not None:
                tensors = tuple(arrays.values())
                if (pointers := addresses(tensors)) is not None and not active():
                    place = (*pointers, *given)
                    recent, results = caller.recent.get(place), None
                    if recent is not None and recent[1](*tensors):
                        results = recent[0].call(tensors, pointers, stream)
                    if results is None:
                        results = caller.call(place, tensors, pointers, given, stream)
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
    signature: tuple[Hashable, ...],
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
    given, _ = split_of(options).parted(options)
    key: Hashable = (*signature, given, *map(layout_of, infos.values()))
    try:
        planned = cache.plans.get(key)
    except Exception:  # an option that cannot be hashed, which ``compute`` refuses
        key = planned = None
    if is_new := planned is None or not planned.allocate_results(infos):
        _check_arrays(infos, backend_name)
        operation = Operation(infos, implementation)
        try:
            compute(operation, *options)
        except InvalidValue as e:
            raise operation.reword(e) from None
        planned = operation.planned()
        if operation.repeatable and key is not None:
            put(cache.plans, key, planned)
    assert planned is not None
    made = [n for n in cleared_in(compute) if n in infos and n not in arrays]
    torch_arrays.clear([infos[name].owner for name in made])
    workspace = planned.run(infos, stream, cache.bound)
    for name in planned.written:
        mark_written(infos[name])
    by_numbers = isinstance(compute, ByNumbers)
    if key is not None and planned.is_of_torch(infos, workspace, by_numbers):
        cache.learn(signature, arrays, options, infos, planned, workspace, is_new)
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
