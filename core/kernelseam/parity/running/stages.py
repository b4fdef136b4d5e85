"""The stages of a parity case: its data made, computed on a device, judged. Only the second needs
the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.parity import (
    attention_bwd_data,
    attention_data,
    check,
    data,
    oracle,
    projection_data,
)
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case, GemmCase, MergeCase
from kernelseam.parity.check import Verdict
from kernelseam.parity.description import describe
from kernelseam.parity.memory import GUARD, Layout, never_written, overrun, workspace
from kernelseam.parity.oracle import Array
from kernelseam.parity.oracle_bwd import Gradient
from kernelseam.parity.projection_case import ProjectionCase
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
    layout = data.layout(case, separate)
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
        for _ in range(2 if repeatable(case) else 1):
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


def repeatable(case: Case) -> bool:
    """Whether a second launch has the same inputs, so that it must give the same bits; the largest
    cases run once."""
    if isinstance(case, BackwardCase) and not case.deterministic:
        return False
    if isinstance(case, ProjectionCase):
        return not case.in_place
    return case.sample is None and not (
        isinstance(case, GemmCase) and (case.beta != 0 or case.in_place)
    )


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
    written = data.outputs(case)
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
    numbers = _rows(case)
    if isinstance(case, GemmCase):
        return check.gemm_verdict(
            _gemm_oracle(case),
            case.terms,
            case.dtype,
            results["C"],
            results["C"].shape[:-1],
            numbers,
            zero_mean=case.data != "positive",
            exact=case.exact,
            flushed=flushed,
            precision=case.precision,
        )
    if isinstance(case, MergeCase):
        x = _values(case)
        return check.merge_states(
            x["outs"], x["lses"], results["out"], results.get("lse"), flushed=flushed
        )
    if isinstance(case, BackwardCase):
        return check.attention_bwd(_backward_oracle(case), case.dtype, results, flushed=flushed)
    if isinstance(case, ProjectionCase):
        return check.projection(
            _projection_oracle(case),
            case.dtype,
            results,
            zero_mean=case.data != "positive",
            exact=case.exact,
            flushed=flushed,
        )
    return check.attention_verdict(
        _attention_oracle(case),
        case.S_k,
        case.head_dim,
        case.dtype,
        results["out"],
        results.get("lse"),
        results["out"].shape[:-1],
        numbers,
        flushed,
    )


def _rows(case: Case) -> oracle.Rows:
    if case.sample is None or isinstance(case, MergeCase | BackwardCase | ProjectionCase):
        return None
    lead = (
        (*case.lead, case.M)
        if isinstance(case, GemmCase)
        else (case.batch, case.num_heads, case.S_q)
    )
    return oracle.sample_rows(math.prod(lead), case.sample)


@lru_cache(maxsize=1)
def _values(case: Case) -> Mapping[str, Array]:
    """A case's inputs, kept from its first stage to its last; nobody writes to them."""
    return data.values(case)


@lru_cache(maxsize=1)
def _gemm_oracle(case: GemmCase) -> oracle.GemmResult:
    x = _values(case)
    return oracle.gemm(
        x["A"],
        x["B"],
        x.get("C"),
        case.alpha,
        case.beta,
        case.a_transposed,
        case.b_transposed,
        _rows(case),
        bias=x["bias"][:, :, 0] if case.bias else None,
        residual=x.get("residual"),
        batch_group=case.c_batch_group,
        head_group=case.c_head_group,
    )


@lru_cache(maxsize=1)
def _attention_oracle(case: AttentionCase) -> oracle.AttentionResult:
    x = _values(case)
    return oracle.attention(
        x["q"],
        x["k"],
        x["v"],
        case.causal,
        case.scale_used,
        _rows(case),
        attention_data.variant(case, x),
    )


@lru_cache(maxsize=1)
def _backward_oracle(case: BackwardCase) -> dict[str, Gradient]:
    return attention_bwd_data.wanted(case, _values(case))


@lru_cache(maxsize=1)
def _projection_oracle(case: ProjectionCase) -> Mapping[str, tuple[oracle.GemmResult, int]]:
    return projection_data.wanted(case, _values(case))
