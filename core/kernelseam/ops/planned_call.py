"""What the functions on arrays remember of a call, by its signature: which results it allocates,
which plans it binds to the arrays' addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelseam.arrays import describe, runtime_of
from kernelseam.contract import ArrayInfo, Device, OperandRule, QuickRuntime, Runtime
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap
from kernelseam.planning import Call, Plan
from kernelseam.planning.binding import Bound, bind, joined
from kernelseam.planning.streams import stream_handle
from kernelseam.planning.workspace import allocate

Infos = dict[str, ArrayInfo]
BoundBy = dict[Hashable, Bound]
"""Bound launches by a planned call, its workspace and the addresses of its arrays."""
KEPT = 1024
"""Entries of each table that is remembered; where there are as many, all are dropped."""


@dataclass(frozen=True)
class Result:
    """An array that a call allocates."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    like: str
    layout: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class PlannedLaunch:
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
class PlannedCall:
    """What is remembered of a call: the results to allocate, the plans to bind."""

    results: tuple[Result, ...]
    launches: tuple[PlannedLaunch, ...]
    device: Device
    runtime: Runtime
    workspace_bytes: int
    """Of the workspace that the launches use one after the other."""
    waits: bool
    """Whether a launch uses what goes when the call returns."""
    written: tuple[str, ...]
    """The caller's arrays that take results."""

    def allocate_results(self, infos: Infos) -> bool:
        """Allocate the results; False, with none kept, where one has another layout than the plans
        were made for."""
        for r in self.results:
            infos[r.name] = info = new_array(r.name, r.shape, r.dtype, infos[r.like])
            if layout_of(info) != r.layout:
                for other in self.results:
                    infos.pop(other.name, None)
                return False
        return True

    def run(self, infos: Infos, stream: object, bound: BoundBy) -> ArrayInfo | None:
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
            launches = bound.get(key) or self.bound_to(
                {n: i.pointer for n, i in infos.items()}, key, bound
            )
            handle = stream_handle(stream, runtime, device, first)
            launches.launch(handle)
        # The library, which takes the workspace back, knows nothing of another stream; nor does
        # anyone of lists.
        if self.waits or (
            own and stream is not None and handle != runtime.current_stream(device, first)
        ):
            runtime.synchronize(device)
        return own

    def bound_to(self, addresses: Mapping[str, int], key: tuple[Any, ...], bound: BoundBy) -> Bound:
        """The launches over these addresses, checked, and remembered by a key whose second is the
        workspace's."""
        launches = joined([x.bind(addresses, key[1], self.runtime) for x in self.launches])
        if len(self.launches) > 1:
            check_apart(self.launches, addresses)
        # On the host lengths and tables are looked at, too, and may change; lists are this call's
        # alone.
        if self.repeats:
            if len(bound) >= KEPT:
                bound.clear()
            bound[key] = launches
        return launches

    @property
    def repeats(self) -> bool:
        """Whether bound launches serve the next call over the same memory."""
        return not self.device.is_host and not self.waits

    def quick(self, infos: Infos, own: ArrayInfo | None) -> bool:
        """Whether calls on tensors of these layouts can take a shortcut: no memory is looked at."""
        every = (*infos.values(), *([] if own is None else [own]))
        quick = self.repeats and all(x.kind == "torch" and x.pointer for x in every)
        return quick and isinstance(self.runtime, QuickRuntime)


def check_apart(launches: Sequence[PlannedLaunch], addresses: Mapping[str, int]) -> None:
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


def layout_of(info: ArrayInfo) -> tuple[object, ...]:
    """All of an array that a plan depends on."""
    return info.shape, info.strides, info.dtype, info.device, info.pointer % 16 == 0, info.writable


def new_array(name: str, shape: Sequence[int], dtype: DType, like: ArrayInfo) -> ArrayInfo:
    runtime = runtime_of(like)
    return describe(runtime.empty(shape, dtype, like.device, like), name, like.device.backend)
