"""A call on arrays as it is cached by its signature: the results to allocate and the plans to
bind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kernelseam.arrays import describe, runtime_of
from kernelseam.capture import refuse_capture
from kernelseam.contract import ArrayInfo, Device, FastRuntime, OperandRule, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass
from kernelseam.overlap import proven_overlap
from kernelseam.planning import Call, Plan
from kernelseam.planning.bound import BoundLaunches
from kernelseam.planning.streams import stream_handle
from kernelseam.planning.workspace import allocate

T = TypeVar("T")
Infos = dict[str, ArrayInfo]
BoundCache = dict[Hashable, BoundLaunches]
"""By array call, workspace address and array addresses."""
MAX_ENTRIES = 1024
"""Entries of each cache; beyond that the oldest are dropped."""

FREED = (
    "this call's workspace is freed when it returns, and the graph would use it later",
    "Capture torch's tensors on torch's current stream, or plan and bind before the capture",
)
"""Rule and remedy."""


@dataclass(frozen=True)
class Result:
    """An array that a call allocates."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    like: str
    layout: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class ArrayPlan:
    """A plan and, for each of its operands, its rule and the name of the array that it is."""

    plan: Plan
    rules: tuple[OperandRule, ...]
    arrays: tuple[str, ...]
    reword: Callable[[InvalidValue], InvalidValue] | None
    call: Call | None = None
    """The bound call, where the plan takes lists of addresses."""

    def bind(self, addresses: Mapping[str, int], workspace: int, runtime: Runtime) -> BoundLaunches:
        """Check the arrays' addresses, given by name, and bind the launches to them."""
        if self.call is not None:
            return BoundLaunches(self.plan.parts.steps, (self.call.launcher(),), plans=(self.plan,))
        pointers = {
            rule.name: addresses[name] for rule, name in zip(self.rules, self.arrays, strict=True)
        }
        try:
            bound = self.plan.bound(
                Resolved(pointers, ()),
                runtime,
                lambda: self.plan.align_workspace(workspace),
                shared=True,
            )
        except InvalidValue as e:
            if self.reword is None:
                raise
            raise self.reword(e) from None
        bound.plans = (self.plan,)
        return bound


@dataclass(frozen=True, eq=False)
class ArrayCall:
    """The cached part of a call."""

    results: tuple[Result, ...]
    launches: tuple[ArrayPlan, ...]
    device: Device
    runtime: Runtime
    workspace_bytes: int
    """Of the one workspace that the launches use in turn."""
    synchronizes: bool
    """Whether the call must wait for its launches: they read lists of addresses that it frees."""
    written: tuple[str, ...]
    """The caller's arrays that the launches write."""

    def allocate_results(self, infos: Infos) -> bool:
        """Allocate the results into ``infos``. Returns False, and adds none, where one has another
        layout than the plans were built for."""
        for r in self.results:
            infos[r.name] = info = new_array(r.name, r.shape, r.dtype, infos[r.like])
            if layout_of(info) != r.layout:
                for other in self.results:
                    infos.pop(other.name, None)
                return False
        return True

    def run(self, infos: Infos, stream: object, bound: BoundCache) -> ArrayInfo | None:
        """Check and bind everything, then launch. Returns the workspace if there is one."""
        device, runtime, first = self.device, self.runtime, next(iter(infos.values()))
        need = self.workspace_bytes
        workspace = allocate(need, device, runtime, first) if need else None
        key: tuple[Any, ...] = (
            self,
            workspace.pointer if workspace else 0,
            *[info.pointer for info in infos.values()],
        )
        with runtime.activate(device):
            launches = bound.get(key) or self.bind_addresses(
                {n: i.pointer for n, i in infos.items()}, key, bound
            )
            handle = stream_handle(stream, runtime, device, first)
            # The library may reuse the workspace at once: its allocator does not know this stream.
            # The lists of addresses are freed with the call.
            waits = self.synchronizes or bool(
                workspace and stream is not None and handle != runtime.current_stream(device, first)
            )
            if waits or (workspace and first.kind != "torch"):
                refuse_capture(runtime, device, *FREED, stream=handle)
            launches.launch(handle)
        if waits:
            runtime.synchronize(device)
        return workspace

    def bind_addresses(
        self, addresses: Mapping[str, int], key: tuple[Any, ...], bound: BoundCache
    ) -> BoundLaunches:
        """Check these addresses and bind the launches to them; cache the result by ``key``, whose
        second entry is the workspace's address."""
        launches = joined([x.bind(addresses, key[1], self.runtime) for x in self.launches])
        if len(self.launches) > 1:
            check_disjoint(self.launches, addresses)
        # On the host, lengths and tables are checked at every call, as they may change.
        if self.repeats:
            put(bound, key, launches)
        return launches

    @property
    def repeats(self) -> bool:
        """Whether bound launches serve a later call over the same memory."""
        return not self.device.is_host and not self.synchronizes

    def is_of_torch(
        self, infos: Infos, workspace: ArrayInfo | None, by_numbers: bool = False
    ) -> bool:
        """Whether it was a call on torch tensors that may be repeated without views of them.
        ``by_numbers``: its ``compute`` packs launches itself."""
        arrays = (*infos.values(), *([] if workspace is None else [workspace]))
        repeatable = self.repeats or (by_numbers and not self.device.is_host)
        if not (repeatable and all(x.kind == "torch" for x in arrays)):
            return False
        return isinstance(self.runtime, FastRuntime) and (
            by_numbers or all(x.pointer for x in arrays)
        )


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


def put(entries: dict[Any, T], key: Hashable, entry: T, most: int | None = None) -> None:
    """Add to a cache, of which the oldest entries go where it is full."""
    while len(entries) >= (MAX_ENTRIES if most is None else most):
        entries.pop(next(iter(entries), None), None)
    entries[key] = entry


def check_disjoint(launches: Sequence[ArrayPlan], addresses: Mapping[str, int]) -> None:
    """Raise InvalidValue where one launch writes memory that a later launch uses as another array.
    Operands of the same launch are checked when it is bound."""
    for i, earlier in enumerate(launches):
        for rule, name in zip(earlier.rules, earlier.arrays, strict=True):
            if not rule.written or not rule.span:
                continue
            address = addresses[name]
            for later in launches[i + 1 :]:
                for other, other_name in zip(later.rules, later.arrays, strict=True):
                    if (
                        other_name != name
                        and other.span
                        and proven_overlap(address, rule, addresses[other_name], other)
                    ):
                        when = "" if other.written else ", which is still to be read"
                        raise InvalidValue(
                            name,
                            hex(address),
                            f"overlaps {other_name}{when}",
                            "Give the output memory of its own",
                        )


def layout_of(info: ArrayInfo) -> tuple[object, ...]:
    """Everything of an array that a plan depends on."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16 == 0, info.writable


def new_array(name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo) -> ArrayInfo:
    runtime = runtime_of(like)
    return describe(runtime.empty(shape, dtype, like.device, like), name, like.device.backend)
