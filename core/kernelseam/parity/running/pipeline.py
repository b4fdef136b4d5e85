"""Many parity cases: one after the other, or with processes that make data and judge results while
the device computes.

Verdicts are the same either way. The device is used by this process alone.
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
from dataclasses import dataclass

import numpy as np

from kernelseam.containment import Contained, told
from kernelseam.contract import Device
from kernelseam.deadline import Hung, within
from kernelseam.errors import DeviceError
from kernelseam.oracle.check import Verdict
from kernelseam.parity.cases.case import Case
from kernelseam.parity.running import stages
from kernelseam.parity.running.run import Outcome, Ran, Target, attempt, guarded, outcome, run_case
from kernelseam.parity.running.workers import Lost, Workers
from kernelseam.plugins import plugins

LIMIT = 300.0
"""Seconds for one stage of a case, compilation included."""
AHEAD = 2
"""Cases a worker whose data may wait for the device, and as many whose results may wait for a
verdict: so much memory is in use at most."""

Job = tuple[Case, list[Target]]
Told = tuple[Outcome, str]
"""An outcome, and how the device was lost with it, "" where it was not."""
Judgement = tuple[Verdict | str, float]
"""A verdict or why there is none, and the seconds that it took."""


def run_all(
    cases: Sequence[Case],
    wanted: Sequence[Target],
    *,
    separate: bool = False,
    workers: int = 0,
    limit: float = LIMIT,
) -> Iterator[Outcome]:
    """Every case on every target of its operation, case by case so that the oracle speaks once,
    outcomes in that order.

    ``workers``: processes that make data and judge results; 0: this process does all of it. With
    workers no stage of a case takes more than ``limit`` seconds: what takes longer is an error.
    Raises DeviceError, after all outcomes that there are, where a device computes nothing any more:
    it names the case.
    """
    jobs = [(c, here) for c in cases if (here := [t for t in wanted if t.operation == c.operation])]
    left = sum(len(here) for _, here in jobs)
    with closing(
        _piped(jobs, separate, workers, limit) if workers else _serial(jobs, separate)
    ) as found:
        for o, gone in found:
            left -= 1
            yield o
            if gone:
                raise DeviceError(
                    f"the device computes nothing any more since {o.case.name} on "
                    f"{o.backend}-{o.implementation}: "
                    f"{gone}. Not run after it: {left}."
                )


def _serial(jobs: Sequence[Job], separate: bool) -> Generator[Told, None, None]:
    for case, here in jobs:
        for target in here:
            o = run_case(case, target, separate=separate)
            yield o, o.error and lost(target.device) or ""


def lost(device: Device) -> str:
    """Why a device can not even copy any more; "" where it can."""
    sent = np.arange(4, dtype=np.float32)
    try:
        runtime = plugins().backend(device.backend).runtime
        with Contained(f"a copy to {device}"), runtime.activate(device):
            array = runtime.from_host(sent, device)
            runtime.synchronize(device)
            came = runtime.to_host(array)
    except Exception as e:
        return told(e)
    return "" if np.array_equal(sent, came) else f"it returns {came.tolist()} for {sent.tolist()}"


# ---------------------------------------------------------------- this process


@dataclass(frozen=True)
class _Run:
    """A case that was computed, and is being judged."""

    case: Case
    ran: list[tuple[Target, Ran]]
    making: float
    """Seconds."""
    judging: Future[list[Judgement]]
    gone: str


def _piped(
    jobs: Sequence[Job], separate: bool, workers: int, limit: float
) -> Generator[Told, None, None]:
    behind: deque[_Run] = deque()
    most = AHEAD * workers
    with closing(Workers(workers, limit)) as team:
        for (case, here), task in _ahead(jobs, team, separate, most):
            before, making = _made(task)
            ran, gone = _compute(case, here, before, limit)
            judging = team.start(
                _judge, case, separate, [(r.computed, t.flushed) for t, r in ran if r.computed]
            )
            behind.append(_Run(case, ran, making, judging, gone))
            while behind and (gone or len(behind) > most or behind[0].judging.done()):
                yield from _outcomes(behind.popleft())
        while behind:
            yield from _outcomes(behind.popleft())


def _ahead(
    jobs: Sequence[Job], team: Workers, separate: bool, most: int
) -> Iterator[tuple[Job, Future[tuple[stages.Made | str, float]]]]:
    """Jobs and their data, which are made while those before them are computed."""
    waiting: deque[tuple[Job, Future[tuple[stages.Made | str, float]]]] = deque()
    for job in jobs:
        waiting.append((job, team.start(_make, job[0], separate)))
        if len(waiting) > most:
            yield waiting.popleft()
    yield from waiting


def _made(task: Future[tuple[stages.Made | str, float]]) -> tuple[stages.Made | str, float]:
    try:
        return task.result()
    except Lost as e:
        return f"its data were not made: {e}", 0.0


def _compute(
    case: Case, here: list[Target], before: stages.Made | str, limit: float
) -> tuple[list[tuple[Target, Ran]], str]:
    """What became of a case on its targets, up to one that is lost, and how that was lost."""
    found: list[tuple[Target, Ran]] = []
    for target in here:
        if isinstance(before, str):
            found.append((target, Ran(error=before)))
            continue
        start, gone = time.perf_counter(), ""
        try:
            ran = within(limit, f"{case.name} on {target}", attempt, case, target, before)
            if ran.error:
                gone = within(limit, f"a copy to {target.device}", lost, target.device)
        except Hung as e:
            gone = f"no answer within {limit:g} s"
            ran = Ran(
                error=f"{gone}. What waits for it:\n{e.stack}", seconds=time.perf_counter() - start
            )
            atexit.register(_leave)
        found.append((target, ran))
        if gone:
            return found, gone
    return found, ""


def _outcomes(run: _Run) -> Iterator[Told]:
    try:
        judged = run.judging.result()
    except Lost as e:
        judged = [(f"there is no verdict: {e}", 0.0)] * len(run.ran)
    verdicts, making = iter(judged), run.making
    for i, (target, ran) in enumerate(run.ran):
        verdict, judging = next(verdicts) if ran.computed else (None, 0.0)
        last = i == len(run.ran) - 1
        yield (
            outcome(run.case, target, ran, verdict, making + ran.seconds + judging),
            run.gone if last else "",
        )
        making = 0.0


def _leave() -> None:
    """End the process at once: a driver that hangs would hang again where it cleans up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


# ---------------------------------------------------------------- a worker


def _make(case: Case, separate: bool) -> tuple[stages.Made | str, float]:
    start = time.perf_counter()
    return guarded(stages.made, case, separate), time.perf_counter() - start


def _judge(
    case: Case, separate: bool, ran: Sequence[tuple[stages.Computed, bool]]
) -> list[Judgement]:
    """Verdicts on results, each with whether subnormals count as lost there."""
    found: list[Judgement] = []
    start = time.perf_counter()
    before = guarded(stages.made, case, separate) if ran else ""
    for after, flushed in ran:
        verdict = (
            before
            if isinstance(before, str)
            else guarded(stages.judged, case, before, after, flushed)
        )
        found.append((verdict, time.perf_counter() - start))
        start = time.perf_counter()
    return found
