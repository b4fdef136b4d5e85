"""How good dispatch's choices are: random problems, each computed by every implementation and tile
that takes it.

Problems are of a few specs of each kind, so that binaries are shared. All configurations are timed
in turns; those near the best, and what dispatch chose, again and longer, since the best of many
short measurements looks better than it is. A choice's *regret* is its time over the best one's,
less 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.contract import Device, Problem
from kernelseam.dispatch import Choice, select
from kernelseam.errors import KernelSeamError
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.variants import SEPARATOR, variants_of

from benchmarks import precompile
from benchmarks.comparing.backward import BackwardRow
from benchmarks.comparing.drawing import Row
from benchmarks.comparing.results import BACK_TO_BACK, OURS, Record, Timed
from benchmarks.comparing.rows import PEERS_DIFFER, Contestant, Session, Wrong, apart
from benchmarks.comparing.timing import Settings, Turn, measure

BEYOND = 4.0
"""Configurations whose predicted time is more than this factor of the choice's are not measured."""
NEAR = 1.15
"""Within this factor of the best, configurations are measured a second time."""
QUICK = Settings(rounds=2, warm_seconds=0.02, burst_seconds=0.002, most_flushed=0)
LONGER = Settings(rounds=5, warm_seconds=0.02, burst_seconds=0.004, most_flushed=0)
GOOD, BAD = 0.05, 0.20
"""Regret within which a choice is good, and beyond which it is a fault."""


@dataclass(frozen=True)
class Question:
    """A row, what dispatch chooses for it and what else is measured, as a caller names them."""

    row: Row
    problem: Problem
    choice: Choice
    others: tuple[str, ...]
    predicted: dict[str, float]
    """Seconds by name, the choice's among them."""
    variant: str = ""
    """The tile that the choice takes of its own accord."""

    @property
    def taken(self) -> str:
        """What dispatch takes, with its tile."""
        name = self.choice.implementation.name
        return name + SEPARATOR + self.variant if self.variant else name

    @classmethod
    def of(cls, row: Row, session: Session) -> Question:
        """Raises Unsupported."""
        problems = (d.simplified()[0].problem() for d in row.planned(session))
        backward = isinstance(row, BackwardRow)
        problem = next(p for p in problems if p.operation.endswith("_bwd") == backward)
        device = session.target()
        choice = select(problem, device)
        costs = {
            c.implementation.name: c.cost.seconds
            for c in choice.candidates
            if c.refusal is None and c.cost is not None
        }
        taken = choice.variant
        most = BEYOND * costs[choice.implementation.name]
        predicted = {choice.implementation.name: costs[choice.implementation.name]}
        for c in choice.candidates:
            implementation, name = c.implementation, c.implementation.name
            if not c.takes:
                continue
            # Which of a library's algorithms is best only a measurement tells: `tune`.
            own = isinstance(implementation, KernelImplementation)
            variants = variants_of(implementation, problem, device) if own else ()
            if not variants:
                predicted.setdefault(name, costs[name])
            # an implementation's first variant is its default, here the choice itself
            first = int(implementation is choice.implementation)
            if first and variants:
                taken = variants[0].name
            predicted |= {name + SEPARATOR + v.name: v.cost.seconds for v in variants[first:]}
        predicted = {name: seconds for name, seconds in predicted.items() if seconds <= most}
        return cls(row, problem, choice, tuple(predicted)[1:], predicted, taken)

    def units(self, device: Device) -> dict[Any, precompile.Unit]:
        """Binaries of all that is measured."""
        units: dict[Any, precompile.Unit] = {}
        by_name = {c.implementation.name: c.implementation for c in self.choice.candidates}
        for called in (self.choice.implementation.name, *self.others):
            name, _, variant = called.partition(SEPARATOR)
            implementation = by_name[name]
            if isinstance(implementation, KernelImplementation):
                units |= precompile.units_of(implementation, self.problem, device, variant)
        return units


def answered(question: Question, session: Session) -> Record:
    """The row's record: what dispatch chose, first, then all others; those near the best by their
    second measurement. Raises Wrong where one's result is not that of the choice."""
    row = question.row
    prepared = row.prepare(replace(session, implementations=question.others, peers=False))
    chosen = next(c for c in prepared.contestants if c.role == OURS)
    others = [
        c for c in prepared.contestants if c.role == OURS and c.implementation in question.others
    ]
    chosen.run()
    for c in others:
        c.run()
        session.synchronize()
        assert c.result is not None and chosen.result is not None
        if not (off := apart(c.result(), chosen.result())) <= PEERS_DIFFER[prepared.dtype]:
            raise Wrong(f"{c.implementation} differs from {chosen.implementation} by {off:.2e}")
    times = _timed([chosen, *others], session, QUICK)
    for t in times:
        t.predicted_us = round(1e6 * question.predicted[t.implementation], 3)
    best = min(map(_seconds, times))
    near = [c for c, t in zip(others, times[1:], strict=True) if _seconds(t) <= NEAR * best]
    if near:
        again = {t.name: t.us for t in _timed([chosen, *near], session, LONGER)}
        times = [replace(t, us=again.get(t.name, t.us)) for t in times]
    times[0] = replace(times[0], implementation=question.taken)
    return Record(row.suite, row.name, row.operations, row.bytes, timed=times)


def again(questions: Iterable[Question], measured: Iterable[Record]) -> list[Record]:
    """An earlier run's records, first in each what dispatch takes by now; a failure where that was
    not measured then."""
    by_name = {(r.suite, r.name): r for r in measured if not r.failure}
    records = []
    for question in questions:
        record = by_name.get((question.row.suite, question.row.name))
        if record is None:
            continue
        taken = [t for t in record.timed if t.implementation == question.taken]
        others = [t for t in record.timed if t.implementation != question.taken]
        failure = "" if taken else f"{question.taken} was not measured"
        records.append(replace(record, timed=taken + others, failure=failure))
    return records


def _timed(contestants: Sequence[Contestant], session: Session, settings: Settings) -> list[Timed]:
    """In turns, in the contestants' order."""
    turns = {c.name: Turn(c.run, c.around) for c in contestants}
    samples, _ = measure(turns, session.clock, settings)
    return [
        Timed(
            c.name,
            c.role,
            c.implementation,
            {BACK_TO_BACK: [round(s * 1e6, 3) for s in samples[c.name].back_to_back]},
        )
        for c in contestants
    ]


def _seconds(timed: Timed) -> float:
    return timed.median(BACK_TO_BACK) or float("inf")


def regret(record: Record) -> float:
    """Of dispatch's choice, the record's first."""
    return _seconds(record.timed[0]) / min(_seconds(t) for t in record.timed) - 1


def line(record: Record) -> str:
    if record.failure:
        return f"FAILED {record.suite}/{record.name}: {record.failure}"
    chosen, best = record.timed[0], min(record.timed, key=_seconds)
    return (
        f"{100 * regret(record):6.1f} %  {record.suite}/{record.name}: {chosen.implementation} "
        f"{_seconds(chosen):.1f} µs"
        + f"; {best.implementation} {_seconds(best):.1f} µs"
        * (best is not chosen)
    )


EXPLAINED = (
    "Random problems, each computed by every implementation and tile that takes it, in turns. A "
    "choice's regret is its time over the best one's, less 1; listed where it is over 5 %."
)


def summary(records: Sequence[Record]) -> list[str]:
    """By suite and of all: how many choices are within GOOD of the best, and the worst."""
    lines = ["| kind | problems | within 5 % | beyond 20 % | mean regret | worst |"]
    lines.append("|---|---|---|---|---|---|")
    measured = [r for r in records if not r.failure]
    suites = list(dict.fromkeys(r.suite for r in measured))
    for name in [*suites, "all"]:
        regrets = [regret(r) for r in measured if name in (r.suite, "all")]
        if regrets:
            good, bad = sum(x <= GOOD for x in regrets), sum(x > BAD for x in regrets)
            lines.append(
                f"| {name} | {len(regrets)} | {100 * good / len(regrets):.0f} % | {bad} | "
                f"{100 * sum(regrets) / len(regrets):.1f} % | {100 * max(regrets):.0f} % |"
            )
    worst = sorted(measured, key=regret, reverse=True)
    lines += ["", *(line(r) for r in worst if regret(r) > GOOD)]
    return lines + [line(r) for r in records if r.failure]


def questions(rows: Iterable[Row], session: Session) -> list[Question]:
    """Of the rows that something supports."""
    asked = []
    for row in rows:
        try:
            asked.append(Question.of(row, session))
        except KernelSeamError:
            continue
    return asked
