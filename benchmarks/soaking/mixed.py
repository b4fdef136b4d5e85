"""Threads that each launch mixed calls on streams of their own, and hold every byte against what
came in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from kernelseam.contract import Device
from kernelseam.oracle.formulas import Array
from kernelseam.parity.running.run import attempt
from kernelseam.parity.running.stages import Prepared, judge, prepare
from kernelseam.planning import Call, plan
from kernelseam.samples.case import Case
from kernelseam.samples.operations.operands import describe, repeatable

from benchmarks.random_problems import chosen
from benchmarks.soaking import Clock, Soaked, free_bytes, runtime_of, streams

LAUNCHES = 8
"""Of every call before its results are looked at."""
KEPT = 32 << 20
"""Bytes of device memory that may be gone when all threads have ended: what a driver keeps for
streams."""
LARGEST = 4 << 20
"""Bytes of a problem: what a stream's turn copies twice."""


@dataclass(frozen=True)
class Known:
    """A problem whose results are known to the bit."""

    case: Case
    before: Prepared
    wanted: Mapping[str, Array]


@dataclass(frozen=True)
class Flight:
    """A call over memory of its own, on a stream of its own."""

    known: Known
    held: Mapping[str, object]
    call: Call
    stream: int


def known(
    cases: Sequence[Case], device: Device, implementation: str, soaked: Soaked
) -> list[Known]:
    """The cases that the device takes and computes alike every time, computed once and judged."""
    targets = {t.operation: t for t in chosen(device, implementation)}
    cases_ = []
    for case in cases:
        if not repeatable(case) or case.operation not in targets:
            continue
        before, target = prepare(case), targets[case.operation]
        if sum(b.nbytes for b in before.buffers.values()) > LARGEST:
            continue
        ran = attempt(case, target, before)
        if ran.error:
            raise RuntimeError(f"{case.name}: {ran.error}")
        if ran.computed is None:
            continue  # refused
        verdict = judge(case, before, ran.computed, target.flushed)
        if not verdict.passed:
            soaked.wrong.append(f"{case.name} alone: {verdict.message}")
            continue
        cases_.append(Known(case, before, ran.computed.buffers))
    return cases_


def begun(what: Known, device: Device, implementation: str, stream: int) -> Flight:
    """Memory as the case wants it, and a call over it."""
    runtime, layout = runtime_of(device), what.before.layout
    buffers = {
        name: runtime.from_host(b.view(np.float32), device)
        for name, b in what.before.buffers.items()
    }
    starts: dict[str, int] = {}
    for name, array in buffers.items():
        info = runtime.describe(array)
        assert info is not None
        starts[name] = info.pointer
    blocks = layout.blocks()
    addresses = {
        name: starts[blocks[p.block][0]] + blocks[p.block][1] + p.offset * p.dtype.itemsize
        for name, p in layout.placements.items()
    }
    descriptor = describe(what.case, layout, addresses, runtime, device)
    return Flight(
        what, buffers, plan(descriptor, device=device, implementation=implementation).bind(), stream
    )


def differs(flight: Flight, device: Device) -> str:
    """Where the results of a call that has ended are not what they should be; "" where they are."""
    runtime = runtime_of(device)
    for name, array in flight.held.items():
        actual = np.ascontiguousarray(runtime.to_host(array)).view(np.uint8).reshape(-1)
        if count := int((actual != flight.known.wanted[name]).sum()):
            return (
                f"{flight.known.case.name}: {count} bytes of {name} are not what the same "
                "call gave alone"
            )
    return ""


def run(
    soaked: Soaked,
    known_cases: Sequence[Known],
    device: Device,
    implementation: str,
    threads: int,
    each: int,
    clock: Clock,
    rounds: int | None = None,
) -> None:
    """``threads`` threads with ``each`` streams, until the clock is over or after so many
    rounds."""
    if not known_cases:
        raise RuntimeError("there is no problem whose results are known")

    def work(thread: int) -> tuple[Counter[str], list[str]]:
        rng, count, wrong = np.random.default_rng(thread), Counter[str](), list[str]()
        runtime = runtime_of(device)
        with runtime.activate(device), np.errstate(all="ignore"):
            own_streams = streams(device, each)
            while not clock.over and (rounds is None or count["rounds"] < rounds) and not wrong:
                drawn = [known_cases[int(i)] for i in rng.integers(len(known_cases), size=each)]
                flights = [
                    begun(x, device, implementation, s)
                    for x, (s, _) in zip(drawn, own_streams, strict=True)
                ]
                for _ in range(LAUNCHES):
                    for flight in flights:
                        flight.call(flight.stream)
                runtime.synchronize(device)
                wrong += filter(None, (differs(flight, device) for flight in flights))
                count.update({"rounds": 1, "calls": LAUNCHES * each, "results compared": each})
        return count, wrong

    before = free_bytes(device)
    with ThreadPoolExecutor(threads) as pool:
        tasks = [pool.submit(_guarded, work, i) for i in range(threads)]
        total = Counter[str]()
        for count, wrong in (task.result() for task in tasks):
            total += count
            soaked.wrong += wrong
    soaked.figures |= {
        "threads": threads,
        "streams": threads * each,
        "different calls": len(known_cases),
        **total,
    }
    after = free_bytes(device)
    if before is not None and after is not None:
        soaked.figures["bytes that threads kept"] = before - after
        if before - after > KEPT:
            soaked.wrong.append(
                f"{before - after} bytes of device memory are gone when all threads have ended"
            )
    if not total["results compared"]:
        soaked.wrong.append("nothing was compared")


def _guarded(
    work: Callable[[int], tuple[Counter[str], list[str]]], thread: int
) -> tuple[Counter[str], list[str]]:
    try:
        return work(thread)
    except Exception as e:
        return Counter(), [f"thread {thread}: {type(e).__name__}: {e}"]
