"""How good dispatch's choices are: random problems, each computed by every implementation and tile
that takes it.

Extents are drawn log-uniformly, ragged ones among them, of a few specs of each kind, so that
binaries are shared. All configurations are timed in turns; those near the best, and what dispatch
chose, again and longer, since the best of many short measurements looks better than it is. A
choice's *regret* is its time over the best one's, less 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from kernelseam.contract import Device, Problem
from kernelseam.dispatch import Choice, select
from kernelseam.errors import KernelSeamError
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.variants import SEPARATOR, variants_of

from benchmarks import precompile
from benchmarks.comparing.attention import AttentionRow
from benchmarks.comparing.backward import BackwardRow
from benchmarks.comparing.decoding import DecodeRow
from benchmarks.comparing.epilogues import EpilogueRow
from benchmarks.comparing.gemm import GemmRow
from benchmarks.comparing.grouped import FORMS, GroupedRow
from benchmarks.comparing.paging import PagedRow
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
MOST_BYTES, MOST_OPERATIONS = 1 << 30, {"float32": 1e11, "": 1e12}
"""Of a problem; operations by dtype, "" for all others."""

Row = AttentionRow | BackwardRow | DecodeRow | EpilogueRow | GemmRow | GroupedRow | PagedRow
Rng = np.random.Generator
Draw = Callable[[Rng], Row]


def log_uniform(rng: Rng, low: int, high: int) -> int:
    """From low to high, both included."""
    return int(min(np.exp(rng.uniform(np.log(low), np.log(high + 1))), high))


def ragged(rng: Rng, low: int, high: int) -> int:
    """The same; two of three are multiples of 64 where they are larger."""
    n = log_uniform(rng, low, high)
    return n if n < 64 or rng.random() < 1 / 3 else n // 64 * 64


def _heads(rng: Rng, group: int) -> tuple[int, int]:
    """Heads, and KV heads (0: as many)."""
    kv_heads = int(rng.choice((1, 2, 4, 8, 16)))
    return kv_heads * group, 0 if group == 1 else kv_heads


def _dense(rng: Rng, D: int, causal: bool, group: int, short: bool) -> Row:
    """As many queries as keys, or where ``short`` a few at the end of many."""
    heads, kv_heads = _heads(rng, group)
    batch, keys = log_uniform(rng, 1, 64), ragged(rng, 16, 16384)
    S = ragged(rng, 2, min(keys, 512)) if short else keys
    return AttentionRow(
        "dense", batch, heads, S, D, causal, kv_heads, keys=keys if short and keys != S else 0
    )


def _small(rng: Rng, D: int, group: int) -> Row:
    """That hardly fills a device."""
    heads, kv_heads = (16, 0) if group == 1 else (8 * group, 8)
    return AttentionRow(
        "small", log_uniform(rng, 1, 8), heads, ragged(rng, 16, 1024), D, True, kv_heads
    )


def _few(rng: Rng, D: int, group: int) -> Row:
    """Few queries at the end of many keys."""
    heads, kv_heads = (16, 0) if group == 1 else (8 * group, 8)
    batch, S, keys = log_uniform(rng, 1, 8), ragged(rng, 9, 512), ragged(rng, 1024, 32768)
    return AttentionRow("few", batch, heads, S, D, True, kv_heads, keys=keys)


def _packed(rng: Rng, D: int, causal: bool) -> Row:
    heads, _ = _heads(rng, 1)
    longest = log_uniform(rng, 16, 8192)
    rows = tuple(log_uniform(rng, 1, longest) for _ in range(log_uniform(rng, 2, 256)))
    return AttentionRow("packed", len(rows), heads, max(rows), D, causal, packed=rows)


def _decode(rng: Rng, D: int, group: int) -> Row:
    heads, kv_heads = _heads(rng, group)
    batch, keys, mixed = log_uniform(rng, 1, 128), log_uniform(rng, 16, 65536), rng.random() < 0.5
    return DecodeRow(batch, keys, heads, kv_heads or heads, D, 16, mixed=bool(mixed))


def _paged(rng: Rng, D: int, group: int) -> Row:
    """Prefills, chunks of sequences or few queries, one of three beside sequences with one
    query."""
    kv_heads = int(rng.choice((1, 2, 4, 8)))
    keys, most = log_uniform(rng, 16, 16384), int(rng.choice((8, 8192)))
    parts = [(log_uniform(rng, 1, 64), log_uniform(rng, 1, min(keys, most)), keys)]
    if rng.random() < 1 / 3:
        parts.append((log_uniform(rng, 1, 128), 1, log_uniform(rng, 16, 16384)))
    return PagedRow(tuple(parts), kv_heads * group, kv_heads, D, 16, suite="paged")


def _backward(rng: Rng, D: int, causal: bool, group: int) -> Row:
    heads, kv_heads = _heads(rng, group)
    return BackwardRow(
        log_uniform(rng, 1, 32), heads, ragged(rng, 16, 8192), D, causal, kv_heads=kv_heads
    )


def _gemm(rng: Rng, dtype: str, b_transposed: bool, many: bool) -> Row:
    high = 2048 if many else 16384
    M, N, K = (ragged(rng, 1, high), *(8 * ragged(rng, 1, high // 8) for _ in range(2)))
    return GemmRow("gemm", log_uniform(rng, 2, 4096) if many else 1, M, N, K, dtype, b_transposed)


def _epilogue(rng: Rng, **options: Any) -> Row:
    """A linear layer with an epilogue."""
    columns, hidden = (64 * log_uniform(rng, 4, 256) for _ in range(2))
    return EpilogueRow("epilogue", log_uniform(rng, 1, 16384), columns, hidden, **options)


def _grouped(rng: Rng, form: str) -> Row:
    """Experts' layers."""
    hidden, width = (64 * log_uniform(rng, 4, 128) for _ in range(2))
    sizes = str(rng.choice(("equal", "skewed", "drawn")))
    experts, tokens = log_uniform(rng, 2, 64), log_uniform(rng, 64, 16384)
    return GroupedRow("grouped", experts, tokens, hidden, width, sizes, form)


KINDS: dict[str, tuple[Draw, ...]] = {
    "attention": (
        *(
            partial(_dense, D=D, causal=causal, group=group, short=short)
            for D, group in ((64, 1), (128, 4), (256, 1))
            for causal, short in ((False, False), (True, False), (True, True))
        ),
        *(partial(_packed, D=D, causal=causal) for D, causal in ((64, True), (128, False))),
    ),
    "small": tuple(partial(_small, D=D, group=group) for D in (64, 128) for group in (1, 4)),
    "few": tuple(partial(_few, D=D, group=group) for D, group in ((128, 4), (64, 1))),
    "decode": tuple(partial(_decode, D=D, group=group) for D, group in ((128, 4), (64, 8))),
    "paged": tuple(partial(_paged, D=D, group=group) for D, group in ((128, 4), (64, 8))),
    "backward": tuple(
        partial(_backward, D=D, causal=causal, group=group)
        for D, causal, group in ((64, False, 1), (128, True, 4), (128, False, 1))
    ),
    "gemm": tuple(
        partial(_gemm, dtype=dtype, b_transposed=transposed, many=many)
        for dtype, transposed in (("bfloat16", True), ("float16", False), ("float32", False))
        for many in (False, True)
    ),
    "epilogue": (
        partial(_epilogue, epilogue="gelu", bias=True),
        partial(_epilogue, epilogue="swiglu", interleaved=True),
        partial(_epilogue, epilogue="silu", sums="row_squares"),
    ),
    "grouped": tuple(partial(_grouped, form=form) for form in FORMS),
}
"""What is drawn of each kind; the extents of a spec's problems differ."""


def drawn(kinds: Iterable[str], count: int, seed: int) -> list[Row]:
    """``count`` problems, as many of each kind; the same of a seed in every run."""
    names = list(kinds)
    if unknown := [n for n in names if n not in KINDS]:
        raise SystemExit(
            f"no kind of problem is {', '.join(unknown)}: choose of {', '.join(KINDS)}"
        )
    return [
        _drawn(KINDS[names[i % len(names)]], i // len(names), np.random.default_rng((seed, i)))
        for i in range(count)
    ]


def _drawn(draws: Sequence[Draw], number: int, rng: Rng) -> Row:
    while True:
        row = draws[number % len(draws)](rng)
        most = MOST_OPERATIONS.get(row.dtype, MOST_OPERATIONS[""])
        if row.operations <= most and row.bytes <= MOST_BYTES:
            return row


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
            if c.refusal is not None:
                continue
            # Which of a library's algorithms is best only a measurement tells: `tune`.
            own = isinstance(implementation, KernelImplementation)
            variants = variants_of(implementation, problem, device) if own else ()
            if not variants:
                predicted.setdefault(name, costs.get(name, 0.0))
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
