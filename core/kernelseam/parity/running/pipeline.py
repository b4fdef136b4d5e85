"""Many parity cases: one after the other, or with worker processes that prepare data and check
results while the device computes.

Verdicts are the same either way. Only this process uses the device.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing

import numpy as np

from kernelseam.containment import Contained, error_text
from kernelseam.contract import Device
from kernelseam.deadline import PluginTimeout, run_with_timeout
from kernelseam.errors import DeviceError
from kernelseam.frozen import dataclass
from kernelseam.oracle.check import Verdict
from kernelseam.parity.running import stages
from kernelseam.parity.running.run import (
    Attempt,
    Outcome,
    Target,
    attempt,
    outcome,
    result_or_traceback,
    run_case,
)
from kernelseam.parity.running.workers import WorkerFailed, Workers
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

LIMIT = 300.0
"""Seconds for one stage of a case, compilation included."""
AHEAD = 2
"""Per worker: the most cases whose data may wait for the device, and the most whose results may
wait for a verdict. This bounds the memory in use."""

Job = tuple[Case, list[Target]]
_Result = tuple[Outcome, str]
"""An outcome, and how the device failed with it: "" where it still works."""
TimedVerdict = tuple[Verdict | str, float]
"""A verdict, or why there is none, and the seconds that it took."""


def run_all(
    cases: Sequence[Case],
    targets: Sequence[Target],
    *,
    separate: bool = False,
    workers: int = 0,
    limit: float = LIMIT,
) -> Iterator[Outcome]:
    """Every case on every target of its operation, case by case, so that the oracle is computed
    once; outcomes come in that order.

    ``workers``: processes that prepare data and check results; 0: this process does all of it. With
    workers, a stage of a case that takes more than ``limit`` seconds is an error. Where a device
    stops working, raises DeviceError naming the case, after yielding the outcomes so far.
    """
    jobs = [
        (c, its_targets)
        for c in cases
        if (its_targets := [t for t in targets if t.operation == c.operation])
    ]
    left = sum(len(its_targets) for _, its_targets in jobs)
    with closing(
        _piped(jobs, separate, workers, limit) if workers else _serial(jobs, separate)
    ) as results:
        for o, failure in results:
            left -= 1
            yield o
            if failure:
                raise DeviceError(
                    f"the device computes nothing any more since {o.case.name} on "
                    f"{o.backend}-{o.implementation}: "
                    f"{failure}. Not run after it: {left}."
                )


def _serial(jobs: Sequence[Job], separate: bool) -> Generator[_Result, None, None]:
    for case, targets in jobs:
        for target in targets:
            o = run_case(case, target, separate=separate)
            yield o, o.error and device_failure(target.device) or ""


def device_failure(device: Device) -> str:
    """Why a device cannot even copy any more; "" where it can."""
    sent = np.arange(4, dtype=np.float32)
    try:
        runtime = plugins().backend(device.backend).runtime
        with Contained(f"a copy to {device}"), runtime.activate(device):
            array = runtime.from_host(sent, device)
            runtime.synchronize(device)
            returned = runtime.to_host(array)
    except Exception as e:
        return error_text(e)
    return (
        ""
        if np.array_equal(sent, returned)
        else f"it returns {returned.tolist()} for {sent.tolist()}"
    )


# ---------------------------------------------------------------- this process


@dataclass(frozen=True)
class _Run:
    """A case that was computed, and whose results are being checked."""

    case: Case
    attempts: list[tuple[Target, Attempt]]
    making: float
    """Seconds spent on its data."""
    judging: Future[list[TimedVerdict]]
    failure: str


def _piped(
    jobs: Sequence[Job], separate: bool, workers: int, limit: float
) -> Generator[_Result, None, None]:
    unchecked: deque[_Run] = deque()
    most = AHEAD * workers
    with closing(Workers(workers, limit)) as pool:
        for (case, targets), task in _ahead(jobs, pool, separate, most):
            before, making = _prepared(task)
            attempts, failure = _compute(case, targets, before, limit)
            judging = pool.start(
                _judge, case, separate, [(r.computed, t.flushed) for t, r in attempts if r.computed]
            )
            unchecked.append(_Run(case, attempts, making, judging, failure))
            while unchecked and (failure or len(unchecked) > most or unchecked[0].judging.done()):
                yield from _outcomes(unchecked.popleft())
        while unchecked:
            yield from _outcomes(unchecked.popleft())


def _ahead(
    jobs: Sequence[Job], team: Workers, separate: bool, most: int
) -> Iterator[tuple[Job, Future[tuple[stages.Prepared | str, float]]]]:
    """Jobs and their data, prepared while earlier jobs are computed."""
    waiting: deque[tuple[Job, Future[tuple[stages.Prepared | str, float]]]] = deque()
    for job in jobs:
        waiting.append((job, team.start(_make, job[0], separate)))
        if len(waiting) > most:
            yield waiting.popleft()
    yield from waiting


def _prepared(
    task: Future[tuple[stages.Prepared | str, float]],
) -> tuple[stages.Prepared | str, float]:
    try:
        return task.result()
    except WorkerFailed as e:
        return f"its data were not prepared: {e}", 0.0


def _compute(
    case: Case, targets: list[Target], before: stages.Prepared | str, limit: float
) -> tuple[list[tuple[Target, Attempt]], str]:
    """A case's attempts on its targets, up to a device that fails, and how that failed ("" where
    none did)."""
    attempts: list[tuple[Target, Attempt]] = []
    for target in targets:
        if isinstance(before, str):
            attempts.append((target, Attempt(error=before)))
            continue
        start, failure = time.perf_counter(), ""
        try:
            attempted = run_with_timeout(
                limit, f"{case.name} on {target}", attempt, case, target, before
            )
            if attempted.error:
                failure = run_with_timeout(
                    limit, f"a copy to {target.device}", device_failure, target.device
                )
        except PluginTimeout as e:
            failure = f"no answer within {limit:g} s"
            attempted = Attempt(
                error=f"{failure}. What waits for it:\n{e.stack}",
                seconds=time.perf_counter() - start,
            )
            atexit.register(_leave)
        attempts.append((target, attempted))
        if failure:
            return attempts, failure
    return attempts, ""


def _outcomes(run: _Run) -> Iterator[_Result]:
    try:
        judged = run.judging.result()
    except WorkerFailed as e:
        judged = [(f"there is no verdict: {e}", 0.0)] * len(run.attempts)
    verdicts, making = iter(judged), run.making
    for i, (target, tried) in enumerate(run.attempts):
        verdict, judging = next(verdicts) if tried.computed else (None, 0.0)
        last = i == len(run.attempts) - 1
        yield (
            outcome(run.case, target, tried, verdict, making + tried.seconds + judging),
            run.failure if last else "",
        )
        making = 0.0


def _leave() -> None:
    """End the process at once: a driver that hangs would hang again where it cleans up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# ---------------------------------------------------------------- a worker


def _make(case: Case, separate: bool) -> tuple[stages.Prepared | str, float]:
    start = time.perf_counter()
    return result_or_traceback(stages.prepare, case, separate), time.perf_counter() - start


def _judge(
    case: Case, separate: bool, computed: Sequence[tuple[stages.Computed, bool]]
) -> list[TimedVerdict]:
    """Verdicts on results, each with whether its device flushes subnormals."""
    verdicts: list[TimedVerdict] = []
    start = time.perf_counter()
    before = result_or_traceback(stages.prepare, case, separate) if computed else ""
    for after, flushed in computed:
        verdict = (
            before
            if isinstance(before, str)
            else result_or_traceback(stages.judge, case, before, after, flushed)
        )
        verdicts.append((verdict, time.perf_counter() - start))
        start = time.perf_counter()
    return verdicts
