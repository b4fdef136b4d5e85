"""Random problems by the ten thousand: processes that each make, launch and judge batches of them
on the device."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.contract import Device
from kernelseam.parity.report import summary
from kernelseam.parity.running.pipeline import device_failure
from kernelseam.parity.running.run import run_case
from kernelseam.parity.running.workers import Workers

from benchmarks import precompile
from benchmarks.drawing import FAMILIES
from benchmarks.random_problems import chosen, draw
from benchmarks.soaking import Clock, Soaked

BATCH = 25
"""Problems that a process is given at once."""
SHARES = {"attention": 60, "products": 40}
"""Of a hundred specs, and of a hundred problems."""
_LONGEST = 120.0
"""Seconds for a batch, compilation of what was not foreseen included."""


@dataclass(frozen=True)
class Batch:
    """Problems of a family by their numbers."""

    family: str
    seed: int
    specs: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """What became of a problem."""

    family: str
    number: int
    status: str
    worst: float
    detail: str = ""


def batches(problems: int, specs: int, seed: int, size: int = BATCH) -> list[Batch]:
    """All problems; the families in turn, so that what is cut off has some of each."""
    batches_: list[tuple[float, Batch]] = []
    for family in FAMILIES:
        count, kinds = (max(n * SHARES[family] // 100, 1) for n in (problems, specs))
        for first in range(0, count, size):
            numbers = tuple(range(first, min(first + size, count)))
            batches_.append((first / count, Batch(family, seed, kinds, numbers)))
    return [batch for _, batch in sorted(batches_, key=lambda x: x[0])]


# ---------------------------------------------------------------- a process

_poisoned = False


def units(batch: Batch, device: Device, implementation: str) -> dict[Hashable, precompile.Unit]:
    """The binaries that a batch launches."""
    problems = draw(FAMILIES[batch.family], batch.seed, batch.specs, list(batch.numbers))
    return precompile.keyed([p.case for p in problems], device, implementation)


def run_batch(
    batch: Batch, device: Device, implementation: str, alone: bool = False
) -> tuple[list[Row], str]:
    """Every problem of a batch up to one that lost the device, and how. ``alone``: this process
    is not a worker."""
    global _poisoned
    if _poisoned:
        # this process's context is lost: the parent gives the batch to another worker
        os._exit(1)
    rows = []
    targets = {t.operation: t for t in chosen(device, implementation)}
    for p in draw(FAMILIES[batch.family], batch.seed, batch.specs, list(batch.numbers)):
        o = run_case(p.case, targets[p.case.operation])
        bad = o.status in summary.FAILED
        worst = 0.0 if o.verdict is None else o.verdict.worst
        detail = f"{o.detail}\n{p.case}" if bad else o.detail if o.status == "refused" else ""
        rows.append(Row(batch.family, p.number, o.status, worst, detail))
        if o.error and (failure := device_failure(device)):
            _poisoned = not alone
            return rows, failure
    return rows, ""


# ---------------------------------------------------------------- this process


def binaries(
    batches: list[Batch], device: Device, implementation: str, workers: int, clock: Clock
) -> list[precompile.Unit]:
    """Every binary that the batches launch, once. Raises TimeoutError."""
    by_key: dict[Hashable, precompile.Unit] = {}
    if not workers:
        for batch in batches:
            by_key |= units(batch, device, implementation)
        return list(by_key.values())
    with closing(Workers(workers, _LONGEST)) as team:
        for task in as_completed(
            [team.start(units, b, device, implementation) for b in batches], clock.left
        ):
            by_key |= task.result()
    return list(by_key.values())


def run(
    soaked: Soaked,
    batches: list[Batch],
    device: Device,
    implementation: str,
    workers: int,
    clock: Clock,
) -> None:
    """All problems on the device, until the clock is over. ``workers``: processes; 0: this one
    alone."""
    total, left = (
        sum(len(b.numbers) for b in batches),
        {(b.family, n) for b in batches for n in b.numbers},
    )
    count, worst = Counter[str](), Row("", -1, "", 0.0)
    for row in _rows(batches, device, implementation, workers, clock):
        left.discard((row.family, row.number))
        count[row.status] += 1
        worst = max(worst, row, key=lambda r: r.worst)
        if row.status in summary.FAILED:
            soaked.wrong.append(f"{row.status} {row.family} {row.number}: {row.detail}")
            print(soaked.wrong[-1], flush=True)
        if count.total() % 2000 == 0:
            print(f"{count.total()} of {total} problems, {clock.left:.0f} s left", flush=True)
    soaked.figures |= {
        "problems": count.total(),
        **count,
        "worst error over tolerance": worst.worst,
        "worst problem": f"{worst.family} {worst.number}",
    }
    if left:
        soaked.wrong.append(f"{len(left)} of {total} problems were not run in the time there was")
    if not count["passed"]:
        soaked.wrong.append("no problem passed")


def _rows(
    batches: list[Batch], device: Device, implementation: str, workers: int, clock: Clock
) -> Iterator[Row]:
    if not workers:
        for batch in batches:
            if clock.over:
                return
            rows, failure = run_batch(batch, device, implementation, alone=True)
            yield from rows
            if failure:
                yield Row(
                    batch.family, rows[-1].number, "error", 0.0, f"the device was lost: {failure}"
                )
                return
        return
    with closing(Workers(workers, _LONGEST)) as team:
        tasks = {team.start(run_batch, b, device, implementation): b for b in batches}
        while tasks:
            again: dict[Future[Any], Batch] = {}
            try:
                for task in as_completed(tasks, clock.left):
                    batch = tasks[task]
                    for row in _answer(task, batch):
                        if isinstance(row, Row):
                            yield row
                        else:
                            again[team.start(run_batch, row, device, implementation)] = row
            except TimeoutError:
                return
            tasks = again


def _answer(task: Future[tuple[list[Row], str]], batch: Batch) -> Iterator[Row | Batch]:
    """Rows of a batch, and the problems to run again: one by one if the process ended, as any of
    them could be the cause."""
    try:
        rows, failure = task.result()
    except Exception as e:
        if len(batch.numbers) == 1:
            yield Row(batch.family, batch.numbers[0], "error", 0.0, f"{type(e).__name__}: {e}")
        else:
            yield from (replace(batch, numbers=(n,)) for n in batch.numbers)
        return
    yield from rows
    if failure:
        yield Row(
            batch.family,
            rows[-1].number,
            "error",
            0.0,
            f"the device was lost to this process: {failure}",
        )
        if rest := batch.numbers[len(rows) :]:
            yield replace(batch, numbers=rest)
