"""The fast path of a repeated call on torch tensors: it reads their addresses, sees that they are
what they were, allocates results and launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, TypeVar

from kernelseam.arrays import torch as torch_arrays
from kernelseam.arrays.guards import Guard, tensor_guard
from kernelseam.capture import refuse_capture
from kernelseam.contract import ArrayInfo, FastRuntime
from kernelseam.ops import planned_call
from kernelseam.ops.planned_call import FREED, BoundLaunches, Infos, PlannedCall
from kernelseam.planning.streams import stream_handle
from kernelseam.trace import active

T = TypeVar("T")


class Shortcuts:
    """Shortcuts by a call's signature, which is all but its tensors, and by their layouts. To read
    these takes longer than to launch: a shortcut that was taken is found again by the tensors'
    addresses, and a guard tells whether their layouts are still the same. Holds no tensors."""

    __slots__ = ("_recent", "addresses", "by_layout")

    def __init__(self) -> None:
        self.by_layout: dict[Hashable, Shortcut] = {}
        self._recent: dict[Hashable, tuple[Shortcut, Guard]] = {}
        self.addresses: torch_arrays.AddressReader | None = None
        """None before the first shortcut."""

    def find(
        self, signature: tuple[object, ...], tensors: tuple[object, ...], pointers: list[int]
    ) -> Shortcut | None:
        """The shortcut of a call on tensors at these addresses."""
        key = (signature, *pointers)
        try:
            recent = self._recent.get(key)
        except Exception:  # an option that cannot be hashed, which the operation refuses
            return None
        if recent is not None and recent[1](*tensors):
            return recent[0]
        shortcut = self.by_layout.get(_with_layouts(signature, tensors, pointers))
        if shortcut is not None:
            guard = next((x for x in shortcut.guards if x(*tensors)), None)
            if guard is None:
                guard = tensor_guard(tensors)
                shortcut.guards = (guard, *shortcut.guards[:3])
            _put(self._recent, key, (shortcut, guard))
        return shortcut

    def add(
        self,
        signature: tuple[object, ...],
        tensors: tuple[object, ...],
        make: Callable[[], Shortcut],
    ) -> None:
        """Remember the shortcut of a call, where its tensors are such that it can be found."""
        self.addresses = self.addresses or torch_arrays.address_reader()
        pointers = None if self.addresses is None else self.addresses(tensors)
        key = None if pointers is None else _with_layouts(signature, tensors, pointers)
        if key is not None:
            _put(self.by_layout, key, make())


def _with_layouts(
    signature: tuple[object, ...], tensors: tuple[object, ...], pointers: list[int]
) -> Hashable:
    """The signature with the tensors' layouts; None where they must not take a shortcut."""
    layouts = torch_arrays.layouts(tensors)
    if layouts is None or not _aligned(pointers):
        return None
    return (signature, *layouts)


def _aligned(pointers: list[int]) -> bool:
    """Whether each is an address of memory, at 16 bytes."""
    return all(x and not x & 15 for x in pointers)


def _put(entries: dict[Hashable, T], key: Hashable, entry: T) -> None:
    if len(entries) >= planned_call.MAX_ENTRIES:
        entries.clear()
    entries[key] = entry


def _tuple_of(places: list[int]) -> Callable[[tuple[object, ...]], tuple[object, ...]]:
    """A function that returns the elements at these places, which are in order."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places) if places else itemgetter(slice(0))


class Shortcut:
    """A planned call for torch tensors of the same layouts. It makes no ``ArrayInfo`` of them."""

    __slots__ = (
        "_allocate_workspace",
        "_allocators",
        "_count_writes",
        "_is_current",
        "_names",
        "_planned",
        "_stream",
        "_written",
        "guards",
    )

    def __init__(self, planned: PlannedCall, infos: Infos, workspace: ArrayInfo | None) -> None:
        assert isinstance(planned.runtime, FastRuntime)
        self._planned, self._names = planned, tuple(infos)
        call_state = planned.runtime.call_state(planned.device, "torch")
        self._is_current, self._stream = call_state.is_current, call_state.current_stream
        self._allocators = [
            (r.name, torch_arrays.allocator(r.shape, r.dtype, infos[r.like].owner))
            for r in planned.results
        ]
        self._allocate_workspace = (
            None
            if workspace is None
            else torch_arrays.allocator(workspace.shape, workspace.dtype, workspace.owner)
        )
        self.guards: tuple[Guard, ...] = ()
        """Of tensors and torch's modes that it was taken for, the latest first."""
        self._written = _tuple_of([self._names.index(name) for name in planned.written])
        self._count_writes = torch_arrays.version_incrementer()

    def call(
        self,
        pointers: list[int],
        tensors: tuple[object, ...],
        stream: object,
        bound: BoundLaunches,
    ) -> dict[str, Any] | None:
        """Allocate the results, launch, and return the results by name.

        ``pointers``: the tensors' addresses. Returns None, with nothing launched, where a result
        cannot be allocated or has another layout: the call must then be planned."""
        planned, workspace_address, workspace = self._planned, 0, None
        results: dict[str, Any] = {}
        try:
            for name, allocate in self._allocators:
                results[name] = x = allocate()
                pointers.append(x.data_ptr())
            if self._allocate_workspace is not None:
                workspace = self._allocate_workspace()
                workspace_address = workspace.data_ptr()
        except Exception:  # the planned call allocates again and raises the proper error
            return None
        key = (planned, workspace_address, *pointers)
        launches = bound.get(key)
        if launches is None and not _aligned(pointers):
            return None
        if stream is None:
            handle = self._stream()
        elif type(stream) is int and 0 <= stream < 2**64:
            handle = stream
        else:
            handle = stream_handle(stream, planned.runtime, planned.device)
        # The library may reuse the workspace at once: its allocator does not know this stream.
        waits = workspace is not None and stream is not None and handle != self._stream()
        if waits:
            refuse_capture(planned.runtime, planned.device, *FREED, stream=handle)
        if launches is not None and self._is_current() and not active():
            launches.run(handle)
        else:
            with planned.runtime.activate(planned.device):
                if launches is None:
                    addresses = dict(zip(self._names, pointers, strict=True))
                    launches = planned.bind_addresses(addresses, key, bound)
                launches.launch(handle)
        if waits:
            planned.runtime.synchronize(planned.device)
        if planned.written:
            self._count_writes(self._written(tensors))
        return results
