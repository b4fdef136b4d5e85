"""The stages of a parity case: its data made, computed on a device, judged. Only the second needs
the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.parity.cases.case import Case
from kernelseam.parity.data.memory import GUARD, Layout, never_written, overrun, workspace
from kernelseam.parity.operations import operands
from kernelseam.parity.operations.operands import describe
from kernelseam.parity.operations.table import operation_of
from kernelseam.planning import plan
from kernelseam.plugins import plugins


@dataclass(frozen=True)
class Made:
    """A case's memory before it is computed: buffers of bytes, the inputs in them, canaries in the
    rest."""

    layout: Layout
    buffers: Mapping[str, Array]


@dataclass(frozen=True)
class Computed:
    """The same buffers after a launch."""

    buffers: Mapping[str, Array]
    changed: int
    """Bytes that a second launch on the same inputs made different."""
    overrun: str = ""
    """What was written around the workspace, in words."""


def made(case: Case, separate: bool = False) -> Made:
    """The first stage. It depends on the case alone: another process makes the same."""
    layout = operands.layout(case, separate)
    buffers = layout.buffers()
    layout.write(buffers, _values(case))
    return Made(layout, buffers)


def computed(case: Case, device: Device, implementation: str, before: Made) -> Computed:
    """The second stage: memory on the device, plan, bind, call, fetch. Raises what any of them
    does."""
    runtime, layout = plugins().backend(device.backend).runtime, before.layout
    with runtime.activate(device), np.errstate(all="ignore"):
        held = {
            name: runtime.from_host(b.view(np.float32), device)
            for name, b in before.buffers.items()
        }
        addresses = _addresses(layout, {name: _pointer(runtime, x) for name, x in held.items()})
        made = describe(case, layout, addresses, runtime, device)
        chosen = plan(made, device=device, implementation=implementation)
        room, address = None, None
        if chosen.workspace_bytes and not layout.separate:  # else it is an allocation of its own
            room = runtime.from_host(workspace(chosen.workspace_bytes).view(np.float32), device)
            address = _pointer(runtime, room) + GUARD
        call, fetched = chosen.bind(workspace=address), []
        for _ in range(2 if operands.repeatable(case) else 1):
            call()
            runtime.synchronize(device)
            fetched.append({name: _bytes(runtime, x) for name, x in held.items()})
        around = "" if room is None else overrun(_bytes(runtime, room))
    first, last = fetched[0], fetched[-1]
    return Computed(first, sum(int((first[name] != last[name]).sum()) for name in first), around)


def judged(case: Case, before: Made, after: Computed, flushed: bool = False) -> Verdict:
    """The third stage: the oracle's verdict."""
    if after.overrun:
        return Verdict(False, math.inf, (), 0, after.overrun)
    if after.changed:
        return Verdict(
            False,
            math.inf,
            (),
            0,
            f"{after.changed} bytes differ after a second launch on the same inputs",
        )
    return judge(case, before.layout, before.buffers, after.buffers, flushed)


def _bytes(runtime: Runtime, array: object) -> Array:
    found: Array = np.ascontiguousarray(runtime.to_host(array)).view(np.uint8).reshape(-1)
    return found


def _pointer(runtime: Runtime, array: object) -> int:
    info = runtime.describe(array)
    if info is None or info.pointer % 16:
        raise AssertionError(
            f"the runtime's from_host must give memory it knows, aligned to 16 bytes, not {info}"
        )
    return info.pointer


def _addresses(layout: Layout, buffers: Mapping[str, int]) -> dict[str, int]:
    """Address of each operand's block, offset included."""
    blocks, found = layout.blocks(), {}
    for name, p in layout.places.items():
        buffer, start = blocks[p.block]
        found[name] = buffers[buffer] + start + p.offset * p.dtype.itemsize
    return found


def judge(
    case: Case,
    layout: Layout,
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    flushed: bool = False,
) -> Verdict:
    """Hold memory after a run against the oracle, and against itself before the run."""
    written = operands.outputs(case)
    stray = layout.stray(before, after, written)
    if stray:
        return Verdict(False, math.inf, (), 0, stray)
    results = {name: layout.read(after, name) for name in written}
    for name, x in results.items():
        missed = never_written(x)
        if missed.any():
            where = tuple(int(i) for i in np.unravel_index(int(missed.argmax()), x.shape))
            return Verdict(
                False,
                math.inf,
                where,
                x.size,
                f"{name}{list(where)} and {missed.sum() - 1} more hold what memory starts with: "
                "never written, or "
                "computed from memory outside the operands",
            )
    return verdict(case, results, flushed)


def verdict(case: Case, results: Mapping[str, Array], flushed: bool = False) -> Verdict:
    """Hold results by name, [batch, head, row, column], against the oracle."""
    return operation_of(case).verdict(case, _expected(case), results, flushed=flushed)


@lru_cache(maxsize=1)
def _values(case: Case) -> Mapping[str, Array]:
    """A case's inputs, kept from its first stage to its last; nobody writes to them."""
    return operation_of(case).values(case)


@lru_cache(maxsize=1)
def _expected(case: Case) -> Any:
    """What the oracle gives, once for all implementations."""
    return operation_of(case).expected(case, _values(case))
