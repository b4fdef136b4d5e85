"""The three stages of a parity case: prepare its data, compute on a device, judge the results. Only
the second needs the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.frozen import dataclass
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case
from kernelseam.samples.data.memory import GUARD, Layout, never_written, overrun, workspace
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe
from kernelseam.samples.operations.table import operation_of


@dataclass(frozen=True)
class Prepared:
    """A case's memory before the launch: byte buffers with the inputs in them and canaries
    elsewhere."""

    layout: Layout
    buffers: Mapping[str, Array]


@dataclass(frozen=True)
class Computed:
    """The same buffers after a launch."""

    buffers: Mapping[str, Array]
    changed: int
    """Bytes that differ after a second launch on the same inputs."""
    overrun: str = ""
    """A message about writes outside the workspace; "" where there are none."""


def prepare(case: Case, separate: bool = False) -> Prepared:
    """The first stage. It depends on the case alone: another process prepares the same bytes."""
    layout = operands.layout(case, separate)
    buffers = layout.buffers()
    layout.write(buffers, _values(case))
    return Prepared(layout, buffers)


def compute(case: Case, device: Device, implementation: str, before: Prepared) -> Computed:
    """The second stage: copy to the device, plan, bind, call, copy back. Raises what any of them
    raises."""
    runtime, layout = plugins().backend(device.backend).runtime, before.layout
    with runtime.activate(device), np.errstate(all="ignore"):
        buffers = {
            name: runtime.from_host(b.view(np.float32), device)
            for name, b in before.buffers.items()
        }
        addresses = _addresses(layout, {name: _pointer(runtime, x) for name, x in buffers.items()})
        descriptor = describe(case, layout, addresses, runtime, device)
        chosen = plan(descriptor, device=device, implementation=implementation)
        workspace_array, address = None, None
        if chosen.workspace_bytes and not layout.separate:  # else it is an allocation of its own
            workspace_array = runtime.from_host(
                workspace(chosen.workspace_bytes).view(np.float32), device
            )
            address = _pointer(runtime, workspace_array) + GUARD
        call, fetched = chosen.bind(workspace=address), []
        for _ in range(2 if operands.repeatable(case) else 1):
            call()
            runtime.synchronize(device)
            fetched.append({name: _bytes(runtime, x) for name, x in buffers.items()})
        overran = "" if workspace_array is None else overrun(_bytes(runtime, workspace_array))
    first, last = fetched[0], fetched[-1]
    return Computed(first, sum(int((first[name] != last[name]).sum()) for name in first), overran)


def judge(case: Case, before: Prepared, after: Computed, flushed: bool = False) -> Verdict:
    """The third stage: the results compared with the oracle."""
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
    return judge_memory(case, before.layout, before.buffers, after.buffers, flushed)


def _bytes(runtime: Runtime, array: object) -> Array:
    contents: Array = np.ascontiguousarray(runtime.to_host(array)).view(np.uint8).reshape(-1)
    return contents


def _pointer(runtime: Runtime, array: object) -> int:
    info = runtime.describe(array)
    if info is None or info.pointer % 16:
        raise AssertionError(
            f"the runtime's from_host must give memory it knows, aligned to 16 bytes, not {info}"
        )
    return info.pointer


def _addresses(layout: Layout, buffers: Mapping[str, int]) -> dict[str, int]:
    """Address of each operand's block, offset included."""
    blocks, addresses = layout.blocks(), {}
    for name, p in layout.placements.items():
        buffer, start = blocks[p.block]
        addresses[name] = buffers[buffer] + start + p.offset * p.dtype.itemsize
    return addresses


def judge_memory(
    case: Case,
    layout: Layout,
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    flushed: bool = False,
) -> Verdict:
    """Compare memory after a run with the oracle, and with the memory before the run."""
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
                f"{name}{list(where)} and {missed.sum() - 1} more hold the initial canary: "
                "never written, or "
                "computed from memory outside the operands",
            )
    return verdict(case, results, flushed)


def verdict(case: Case, results: Mapping[str, Array], flushed: bool = False) -> Verdict:
    """Compare results by name, [batch, head, row, column], with the oracle."""
    return operation_of(case).verdict(case, expected(case), results, flushed=flushed)


@lru_cache(maxsize=1)
def _values(case: Case) -> Mapping[str, Array]:
    """A case's inputs, cached from its first stage to its last; never written to."""
    return operation_of(case).values(case)


@lru_cache(maxsize=1)
def expected(case: Case) -> Any:
    """The oracle's results, computed once for all implementations that run the case in turn."""
    return operation_of(case).expected(case, _values(case))
