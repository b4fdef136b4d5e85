"""``python -m benchmarks`` without a GPU: how times are taken, on a clock that is told; rows,
small, on the host; what is written and drawn."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def comparing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, imported from the root, gradients off as in a run."""
    monkeypatch.syspath_prepend(str(ROOT))
    import benchmarks.comparing as found
    from benchmarks.comparing import (  # noqa: F401
        attention,
        attention_rows,
        backward,
        clocks,
        command,
        compiling,
        decoding,
        definitions,
        epilogues,
        fp8,
        gemm,
        grouped,
        host,
        host_new,
        listed,
        machine,
        models,
        paging,
        projections,
        rows,
        running,
        tables,
        timing,
    )

    with torch.no_grad():
        torch.manual_seed(0)
        yield found


@dataclass
class ToldClock:
    """Each run takes what it is told to, more with every launch that came before; a flush adds a
    tenth."""

    us: dict[Callable[[], object], float]
    capturing: bool = True
    drift: float = 0.0
    asked: list[tuple[str, int]] = field(default_factory=list)
    launches: int = 0
    replayed: dict[Callable[[], object], tuple[Callable[[], object], int]] = field(
        default_factory=dict
    )

    def _seconds(self, run: Callable[[], object]) -> float:
        of, count = self.replayed.get(run, (run, 1))
        self.launches += count
        return count * self.us[of] * 1e-6 * (1 + self.drift * self.launches)

    def burst(self, run: Callable[[], object], count: int) -> float:
        self.asked.append((run(), count))  # type: ignore[arg-type]
        return sum(self._seconds(run) for _ in range(count))

    def flushed(self, run: Callable[[], object], count: int) -> list[float]:
        self.asked.append((f"{run()} flushed", count))
        return [1.1 * self._seconds(run) for _ in range(count)]

    def captured(self, run: Callable[[], object], count: int) -> Callable[[], object] | None:
        if not self.capturing:
            return None

        def replay() -> object:
            return f"{run()} graph"

        self.replayed[replay] = run, count
        return replay


def a() -> str:
    return "a"


def b() -> str:
    return "b"


class TestTiming:
    def test_in_turns(self, comparing: Any) -> None:
        """Each round asks everyone, from another one on each time; bursts are of one length."""
        settings = comparing.timing.Settings(
            rounds=3, warm_seconds=0.1, burst_seconds=0.01, most_flushed=4
        )
        clock = ToldClock({a: 1000.0, b: 5000.0})
        actual, captured = comparing.timing.measure(
            {"a": comparing.timing.Turn(a), "b": comparing.timing.Turn(b)}, clock, settings
        )
        assert not captured
        rounds = clock.asked[-12:]
        assert rounds == [
            ("a", 10),
            ("b", 2),
            ("a flushed", 4),
            ("b flushed", 2),
            ("b", 2),
            ("a", 10),
            ("b flushed", 2),
            ("a flushed", 4),
            ("a", 10),
            ("b", 2),
            ("a flushed", 4),
            ("b flushed", 2),
        ]
        assert (
            actual["a"].back_to_back == pytest.approx([1e-3] * 3) and len(actual["a"].flushed) == 12
        )
        assert actual["b"].flushed == pytest.approx([5.5e-3] * 6)

    def test_the_card_is_warm_first(self, comparing: Any) -> None:
        settings = comparing.timing.Settings(rounds=1, warm_seconds=0.5, burst_seconds=0.01)
        clock = ToldClock({a: 1000.0, b: 2000.0})
        comparing.timing.measure(
            {"a": comparing.timing.Turn(a), "b": comparing.timing.Turn(b)}, clock, settings
        )
        before = sum(count * {"a": 1e-3, "b": 2e-3}[name] for name, count in clock.asked[:-4])
        assert 0.5 <= before < 0.55

    def test_what_drifts_hits_all_alike(self, comparing: Any) -> None:
        """A clock that falls by a tenth over the run leaves the ratio alone."""
        settings = comparing.timing.Settings(
            rounds=20, warm_seconds=0, burst_seconds=0.01, most_flushed=1
        )
        clock = ToldClock({a: 1000.0, b: 1000.0}, drift=0.1 / 460)
        actual, _ = comparing.timing.measure(
            {"a": comparing.timing.Turn(a), "b": comparing.timing.Turn(b)}, clock, settings
        )
        mine, theirs = (np.median(actual[n].back_to_back) for n in "ab")
        assert actual["a"].back_to_back[-1] / actual["a"].back_to_back[0] > 1.08
        assert theirs / mine == pytest.approx(1, abs=3e-3)

    def test_short_launches_are_replayed(self, comparing: Any) -> None:
        """All of them, if one is short; none, if one cannot be captured."""
        turns = {"a": comparing.timing.Turn(a), "b": comparing.timing.Turn(b)}
        settings = comparing.timing.Settings(rounds=2, warm_seconds=0, burst_seconds=0.01)
        clock = ToldClock({a: 5.0, b: 50.0})
        actual, captured = comparing.timing.measure(turns, clock, settings)
        assert captured and ("a graph", 100) in clock.asked and ("b graph", 10) in clock.asked
        assert actual["a"].back_to_back == pytest.approx([5e-6] * 2)
        _, captured = comparing.timing.measure(
            turns, ToldClock({a: 5.0, b: 50.0}, capturing=False), settings
        )
        assert not captured
        _, captured = comparing.timing.measure(turns, ToldClock({a: 125.0, b: 150.0}), settings)
        assert not captured

    def test_what_selects_is_entered_for_a_burst(self, comparing: Any) -> None:
        from contextlib import contextmanager

        entered: list[str] = []

        @contextmanager
        def around() -> Iterator[None]:
            entered.append("in")
            yield
            entered.append("out")

        def run() -> str:
            assert entered[-1] == "in"
            return "run"

        settings = comparing.timing.Settings(rounds=3, warm_seconds=0)
        comparing.timing.measure(
            {"x": comparing.timing.Turn(run, around)}, ToldClock({run: 900.0}), settings
        )
        assert entered == ["in", "out"] * (2 + 2 * 3)


@pytest.fixture
def session(comparing: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """On the host, where torch's plain attention stands for FlashAttention-2."""
    from torch.nn.attention import SDPBackend

    from benchmarks.comparing.clocks import HostClock

    monkeypatch.setitem(comparing.attention.TORCH_PEERS, "FA2", SDPBackend.MATH)
    settings = comparing.timing.Settings(
        rounds=2, warm_seconds=0, burst_seconds=1e-4, most_flushed=2
    )
    return comparing.rows.Session("cpu", HostClock(), settings, ("numpy", "nosuch"))


def measured(comparing: Any, session: Any, row: Any) -> tuple[Any, Any, Any]:
    """The row's record, which has no failure; prepared once more, and its first contestant, which
    has run and is right."""
    assert comparing.running.compile_ahead([row], session) == [], "the host has nothing to compile"
    record = comparing.running.measured(row, session)
    assert not record.failure, record.failure
    assert record.of("ours")[0].worst <= 1
    prepared = row.prepare(session)
    contestant = prepared.contestants[0]
    contestant.run()
    assert prepared.judge(contestant.result()).worst <= 1
    return record, prepared, contestant


def judged(comparing: Any, session: Any, row: Any, *shape: int) -> Any:
    """The row's record; its results have this shape, where one is given, and a wrong last element
    is found."""
    record, prepared, contestant = measured(comparing, session, row)
    wrong = contestant.result().clone()
    assert not shape or wrong.shape == shape
    wrong[tuple(n - 1 for n in wrong.shape)] += 1
    assert prepared.judge(wrong).worst > 1
    return record


def attention_row(comparing: Any, *problem: Any, **options: Any) -> Any:
    return comparing.attention.AttentionRow("attention", *problem, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"kv_heads": 2, "dtype": "float16", "causal": True},
    "wide": {"D_v": 16},
    "window": {"window": (9, 0)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "lengths": {"causal": True, "lengths": (70, 33)},
    "varlen": {"causal": True, "packed": (70, 1)},
    **{kind: {"scores": kind} for kind in ("sink", "falling", "rising", "jump")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_rows(comparing: Any, session: Any, name: str) -> None:
    """Each option's row gives right results, and finds a wrong one."""
    row = attention_row(comparing, 2, 4, 70, 32, **OPTIONS[name])
    record, prepared, contestant = measured(comparing, session, row)
    (ours,) = record.of("ours")
    assert ours.implementation == "numpy"
    assert ours.error < 1e-2 and (ours.error > 1e-5 or name == "sink")
    assert len(ours.us["back to back"]) == 2 and len(ours.us["flushed"]) >= 2
    assert "nosuch" in record.refused["ours by nosuch"]
    plain = name in ("plain", "causal", "grouped", "wide")
    assert [t.name for t in record.of("peer")] == ["FA2"] * plain
    beside = name in ("window", "softcap", "sinks", "lengths")
    assert [t.name for t in record.of("without")] == ["ours without"] * beside
    contestant.result()[(0,) * contestant.result().ndim] += 1.0
    assert prepared.judge(contestant.result()).worst > 1, "the first element of all is looked at"


def test_a_row_that_fails(comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is a record with its reason, and the run goes on."""
    row = attention_row(comparing, 2, 4, 70, 32)
    judge = comparing.attention.Judge
    monkeypatch.setattr(
        comparing.attention,
        "Judge",
        lambda *x: lambda result: replace(judge(*x)(result), worst=1.5, message="out[0, 0] is off"),
    )
    record = comparing.running.measured(row, session)
    assert (
        record.failure.startswith("Wrong: ours [numpy]: relative error ")
        and "out[0, 0] is off" in record.failure
    )
    assert comparing.tables.line(record).startswith(
        "FAILED attention/B2 H4 S70 D32: Wrong: ours [numpy]"
    )
    assert comparing.tables.failures([record]) == 1

    def broken(self: Any, session: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(comparing.attention.AttentionRow, "prepare", broken)
    assert (
        "RuntimeError: the GPU is gone (test_benchmarks.py:"
        in comparing.running.measured(row, session).failure
    )


def test_a_peer_that_computes_something_else(
    comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.functional as functional

    right = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *x, **y: 1.05 * right(*x, **y)
    )
    record = comparing.running.measured(attention_row(comparing, 2, 4, 70, 32), session)
    assert record.failure.startswith("Wrong: FA2: relative error 4.98e-02. out[0, 0, ")


GEMMS: dict[str, tuple[Any, ...]] = {
    "f16 NT": (5, 33, 17, 40, "float16", True),
    "bf16": (5, 33, 17, 40, "bfloat16"),
    "f64": (2, 1, 17, 40, "float64"),
    "bias": (1, 33, 17, 40, "bfloat16", True, True),
    "residual": (1, 33, 17, 40, "float32", True, False, True),
    "both": (1, 33, 17, 40, "bfloat16", True, True, True),
    "lists in one": (6, 33, 17, 40, "float16", True, False, False, "in one allocation, shuffled"),
    "lists one by one": (
        6,
        33,
        17,
        40,
        "float16",
        True,
        False,
        False,
        "allocated one by one, shuffled",
    ),
}


@pytest.mark.parametrize("form", ["forward", "input gradient", "weight gradient"])
@pytest.mark.parametrize("sizes", ["skewed", "zipf"])
def test_grouped_rows(comparing: Any, session: Any, sizes: str, form: str) -> None:
    row = comparing.grouped.GroupedRow("grouped", 4, 70, 24, 40, sizes, form, "float16")
    assert row.counts.sum() == 70 and len(row.counts) == 4
    assert row.operations == 2 * 70 * 24 * 40
    record = comparing.running.measured(row, session)
    assert not record.failure, record.failure
    (ours,) = record.of("ours")
    assert ours.worst <= 1 and [t.name for t in record.of("copy")] == ["copy"]
    prepared = row.prepare(session)
    contestant = prepared.contestants[0]
    contestant.run()
    c = contestant.result().clone()
    c.view(-1)[-1] += 1.0
    assert prepared.judge(contestant.result()).worst <= 1 < prepared.judge(c).worst


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_rows(comparing: Any, session: Any, block: int) -> None:
    row = comparing.fp8.Fp8Row("gemm-e4m3", 1, 40, 256, 384, "equal", block=block)
    assert row.name == "40×384×256 e4m3" + " by 128" * (block > 0)
    assert (row.operations, row.bytes) == (2 * 40 * 384 * 256, (40 + 384) * 256 + 2 * 40 * 384)
    record = judged(comparing, session, row, 40, 384)
    peers = {"cuBLASLt"} if block else {"cuBLASLt", "cuBLASLt, fast accumulation"}
    assert {*(t.name for t in record.of("peer")), *record.refused} == {*peers, "ours by nosuch"}


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_lists(comparing: Any, session: Any, turned: bool) -> None:
    sizes = ((16, 24, 40), (8, 8, 16), (72, 16, 8))
    row = comparing.listed.ListedRow("grouped", "some", sizes, turned)
    record = judged(comparing, session, row)
    assert record.operations == 2 * (16 * 24 * 40 + 8 * 8 * 16 + 72 * 16 * 8)
    assert [t.name for t in record.of("peer")] == ["torch.mm one by one"]
    assert all(list(x.planned(session)) for x in comparing.listed.listed_rows())


@pytest.mark.parametrize(
    ("epilogue", "more"),
    [
        ("relu", {"bias": True}),
        ("gelu_tanh", {"bias": True}),
        ("silu", {"preactivation": True}),
        ("swiglu", {"bias": True, "preactivation": True}),
        ("geglu", {"interleaved": True, "sums": "column_sums"}),
        ("silu", {"sums": "row_squares"}),
    ],
)
def test_epilogue_rows(comparing: Any, session: Any, epilogue: str, more: dict[str, Any]) -> None:
    row = comparing.epilogues.EpilogueRow("gemm-epilogue", 33, 20, 40, epilogue, **more)
    record = judged(comparing, session, row)
    library = ["cuBLASLt"] * (epilogue in ("relu", "gelu_tanh"))
    assert [t.name for t in record.of("peer")] == [*library, "torch"]
    assert [t.name for t in record.of("without")] == ["ours, no epilogue"]


@pytest.mark.parametrize("name", GEMMS)
def test_gemm_rows(comparing: Any, session: Any, name: str) -> None:
    row = comparing.gemm.GemmRow("gemm", *GEMMS[name])
    record = judged(comparing, session, row)
    assert [t.name for t in record.of("copy")] == ["copy"]
    if name.startswith("lists"):
        assert [t.name for t in record.of("without")] == ["ours by strides", "cuBLAS by strides"]
        assert not record.of("peer") and "cublas-batched" in record.refused["cuBLAS"]
    else:
        assert [t.name for t in record.of("peer")] == ["cuBLAS"]


@pytest.mark.parametrize(
    ("causal", "heads", "kv_heads"), [(False, 3, 0), (True, 3, 0), (True, 6, 3)]
)
def test_backward_rows(
    comparing: Any, session: Any, causal: bool, heads: int, kv_heads: int
) -> None:
    """In order and in any order, each beside torch's; a wrong element of any gradient is found."""
    row = comparing.backward.BackwardRow(2, heads, 48, 32, causal, kv_heads=kv_heads)
    assert row.name == "B2 H" + ("6/3" if kv_heads else "3") + " S48 D32" + " causal" * causal
    record, prepared, contestant = measured(comparing, session, row)
    assert record.operations == 10 * 2 * heads * 48 * 48 * 32 * (0.5 if causal else 1)
    assert record.bytes == 8 * 2 * 48 * 32 * (heads + 3)
    assert [t.name for t in record.of("ours")] == ["ours", "ours, any order"]
    assert all(
        t.error < 4e-3 and t.worst == pytest.approx(t.error / 2e-2) for t in record.of("ours")
    )
    assert [t.name for t in record.of("peer")] == ["FA2"] and "backend" in record.refused["cuDNN"]
    assert [c.repeats for c in prepared.contestants[:2]] == [True, False]
    last = {"dq": heads - 1, "dk": 2, "dv": 2}
    for name, head in last.items():
        wrong = contestant.result().clone()
        row.parted(wrong)[name][1, head, 5, 7] += 10
        judged = prepared.judge(wrong)
        assert judged.worst > 1 and judged.message == f"{name}[1, {head}] is off"
    wrong[0] = float("nan")
    assert (
        not prepared.judge(wrong).worst <= 1 and prepared.judge(wrong).message == "dq[0, 0] is off"
    )


def test_other_bits_after_the_times(
    comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must repeat its bits and does not fails its row."""
    from benchmarks.comparing import rows

    measure = rows.measure

    def disturbed(turns: Any, *others: Any) -> Any:
        prepared.contestants[at].result()[0] += 1
        return measure({}, *others)[0] | {
            n: comparing.timing.Samples([1.0], [1.0]) for n in turns
        }, False

    monkeypatch.setattr(rows, "measure", disturbed)
    row = comparing.backward.BackwardRow(1, 1, 16, 16)
    for at in (1, 0):
        prepared = row.prepare(session)
        record = comparing.results.Record(row.suite, row.name)
        if at:
            rows.compared(record, prepared, session)
            continue
        with pytest.raises(
            rows.Wrong, match="ours \\[numpy\\]: other bits after it was timed than before"
        ):
            rows.compared(record, prepared, session)


@pytest.mark.parametrize(("page", "mixed"), [(16, False), (40, False), (16, True)])
def test_decode_rows(comparing: Any, session: Any, page: int, mixed: bool) -> None:
    row = comparing.decoding.DecodeRow(3, 100, 8, 2, 64, page, mixed=mixed)
    assert len(set(row.lengths)) == (3 if mixed else 1) and max(row.lengths) <= 100
    assert row.bytes == 2 * sum(row.lengths) * 2 * 64 * 2
    record = judged(comparing, session, row, 3, 1, 8, 64)
    assert [t.name for t in record.of("copy")] == ["copy"]


def test_paged_rows(comparing: Any, session: Any) -> None:
    """Beside the same rows packed."""
    row = comparing.paging.PagedRow(((1, 20, 50), (2, 3, 0)), 4, 2, 64, 16)
    assert row.name == "1 × 20 of 50 + 2 × 3 of 1, 33, … H4/2 D64 page 16"
    assert (row.queries, row.lengths, row.pages) == ([20, 3, 3], [50, 1, 33], [4, 1, 3])
    pairs = sum(range(31, 51)) + 1 + (31 + 32 + 33)
    assert row.operations == 4 * pairs * 4 * 64
    assert row.bytes == 2 * 64 * (2 * 26 * 4 + 2 * 84 * 2)
    record = judged(comparing, session, row, 26, 4, 64)
    assert record.of("packed rows")[0].worst <= 1


def test_a_decode_row_whose_values_are_columns_of_the_keys(comparing: Any, session: Any) -> None:
    row = comparing.decoding.DecodeRow(3, 100, 8, 1, 64, 16, latent=40)
    assert row.name == "B3 × 100 H8/1 D64/40 latent page 16"
    assert row.bytes == 2 * 300 * 64 and row.operations == 2 * 300 * 8 * 104
    record = judged(comparing, session, row, 3, 1, 8, 40)
    assert [t.name for t in record.of("copy")] == ["copy"]
    assert record.refused["FA3"] == "it has no head dims 576/512"


def test_a_decode_row_of_rows_that_have_their_scales(comparing: Any, session: Any) -> None:
    row = comparing.decoding.DecodeRow(3, 100, 8, 1, 48, 16, latent=32, scale_block=16)
    assert row.name == "B3 × 100 H8/1 D48/32 latent scaled rows page 16"
    assert row.bytes == 300 * (32 + 2 * 4 + 16 * 2)
    judged(comparing, session, row, 3, 1, 8, 32)


def test_a_paged_row_whose_values_are_columns_of_the_keys(comparing: Any, session: Any) -> None:
    row = comparing.paging.PagedRow(((1, 20, 50), (2, 3, 0)), 4, 1, 72, 16, latent=64)
    assert row.name == "1 × 20 of 50 + 2 × 3 of 1, 33, … H4/1 D72/64 latent page 16"
    pairs = sum(range(31, 51)) + 1 + (31 + 32 + 33)
    assert row.operations == 2 * pairs * 4 * (72 + 64)
    assert row.bytes == 2 * (26 * 4 * (72 + 64) + 84 * 72)
    record = judged(comparing, session, row, 26, 4, 64)
    assert [t.name for t in record.timed] == ["ours"]
    assert record.refused["FA3"] == "it has no head dims 576/512"


def test_rows_of_public_definitions(comparing: Any, session: Any) -> None:
    """Each says its definition's constant axes, and a row gives the record of what computes it."""
    rows = comparing.running.chosen(["definitions"])
    names = {r.title for r in rows}
    assert len(names) == 145 and not names & comparing.definitions.UNPUBLISHED
    for r in rows:
        kind = r.title
        numbers = [int(n) for n in re.findall(r"_[a-z]+(\d+)(?=_|$)", kind)]
        inner = r.row
        if kind.startswith("gqa_ragged"):
            assert numbers == [inner.heads, inner.kv_heads, inner.D]
        elif kind.startswith("gqa_paged"):
            assert numbers == [inner.heads, inner.kv_heads, inner.D, inner.page]
        elif kind.startswith("mla_paged"):
            assert numbers == [inner.heads, inner.latent, inner.D - inner.latent, inner.page]
        elif kind.startswith("mla_ragged"):
            assert numbers == [inner.heads, inner.D, inner.D_v]
        elif kind.startswith("gemm"):
            assert numbers == [inner.N, inner.K] and inner.b_transposed
        else:
            experts, hidden, intermediate = numbers[-3:]
            assert experts == inner.experts
            of_products = {(hidden, 2 * intermediate), (intermediate, hidden)}
            assert (inner.hidden, inner.width) in of_products
    small = comparing.attention.AttentionRow("definitions", 1, 2, 16, 16, True)
    record = comparing.rows.NamedRow("gqa_of_a_kind", small, "definitions").measure(session)
    assert (record.suite, record.name) == ("definitions", f"gqa_of_a_kind: {small.name}")
    assert record.of("ours")[0].worst <= 1


def test_a_row_of_experts_in_blocks_of_8_bits(comparing: Any, session: Any) -> None:
    row = comparing.grouped.GroupedRow("definitions", 3, 20, 200, 304, "drawn", block=128)
    assert row.name == "E3 20×200→304 e4m3 by 128 drawn forward"
    assert row.bytes == 20 * 200 + int((row.counts > 0).sum()) * 200 * 304 + 2 * 20 * 304
    record, prepared, contestant = measured(comparing, session, row)
    assert [t.name for t in record.of("peer")] == ["torch._grouped_mm in bfloat16"]
    wrong = contestant.result().clone()
    wrong[19] += 10 * wrong.abs().max()
    assert prepared.judge(wrong).worst > 1


@pytest.mark.parametrize("tokens", [20, 70])
@pytest.mark.parametrize(
    "kind",
    [
        "qkv",
        "qkv turned",
        "output head-major",
        "output token-major",
        "qkv backward",
        "output backward",
    ],
)
def test_projection_rows(comparing: Any, session: Any, kind: str, tokens: int) -> None:
    """Each result is looked at, at its first element and, but for weights, at its last."""
    row = comparing.projections.ProjectionRow(kind, tokens, 64, 4, 2, 32)
    record, prepared, contestant = measured(comparing, session, row)
    assert [t.name for t in record.of("peer")] == ["torch linear"]
    assert record.operations == 2 * tokens * 64 * (256 if kind.startswith("qkv") else 128) * (
        1 + ("backward" in kind)
    )
    for name, part in row.split(contestant.result()).items():
        for at in (0, -1)[: 1 if name in ("d_weight", "d_bias") else 2]:
            before = part.view(-1)[at].clone()
            part.view(-1)[at] += 100
            judged = prepared.judge(contestant.result())
            assert judged.worst > 1 and judged.message.startswith(name), name
            part.view(-1)[at] = before


def test_what_a_row_counts(comparing: Any) -> None:
    """Operations and bytes of the tables that peers are quoted with; pairs by brute force."""
    row = attention_row(comparing, 4, 16, 4096, 128, causal=True)
    assert (
        row.operations == 4 * 4 * 16 * 4096 * 4096 * 128 / 2
        and row.bytes == 4 * 2 * 4 * 16 * 4096 * 128
    )
    assert (
        attention_row(comparing, 4, 32, 4096, 128, kv_heads=8).bytes
        == (2 * 32 + 2 * 8) * 2 * 4 * 4096 * 128
    )
    for causal, window in (
        (False, (9, 0)),
        (False, (5, 7)),
        (True, (5, 7)),
        (False, (None, 3)),
        (True, None),
    ):
        for q, k in ((40, 40), (13, 40), (40, 13)):
            i, j = np.ogrid[:q, :k]
            d = j - i - (k - q)
            left, right = window or (None, None)
            seen = (d <= 0) if causal else np.ones((q, k), bool)
            seen &= (d >= -(10**6 if left is None else left)) & (
                d <= (10**6 if right is None else right)
            )
            if q == k and window is None:
                continue  # counted half, as everybody does
            assert comparing.attention.visible_pairs(q, k, causal, window) == seen.sum(), (
                causal,
                window,
                q,
                k,
            )
    gemm = comparing.gemm.GemmRow("gemm", 384, 512, 512, 64, "float16", True)
    assert gemm.operations == 2 * 384 * 512 * 512 * 64 and gemm.bytes == 2 * 384 * (
        2 * 512 * 64 + 512 * 512
    )
    assert gemm.moves and not comparing.gemm.GemmRow("gemm", 1, 8192, 8192, 8192, "bfloat16").moves


def test_hard_scores(comparing: Any) -> None:
    """They are what their names say, to the rounding of bfloat16."""
    for kind in comparing.attention.ADVERSARIAL:
        q, k = (torch.zeros(1, 100, 1, 64, dtype=torch.bfloat16) for _ in range(2))
        comparing.attention.hardened(kind, q, k)
        scores = (q[0, 0, 0].double() @ k[0, :, 0].double().T / 8).numpy()
        along = np.linspace(0, 1, 100)
        wanted = {
            "sink": np.where(along == 0, 40.0, 0.0),
            "falling": 200 - 200 * along,
            "rising": 200 * along,
            "jump": np.where(along < 0.4, 300.0, 0.0),
        }[kind]
        assert np.abs(scores - wanted).max() <= 200 * 2**-8, kind


def test_the_requested_rows(comparing: Any) -> None:
    """Names are unique; the tables of the peers' own figures are complete."""
    for suite in comparing.running.SUITES:
        names = [r.name for r in comparing.running.chosen([suite])]
        assert len(names) == len(set(names)) > 0, suite
        assert all(r.suite == suite for r in comparing.running.chosen([suite]))
    assert len(comparing.running.chosen(["attention"])) == 22
    assert len(comparing.running.chosen(["attention"], ["*D256*causal"])) == 3
    assert [r.name for r in comparing.running.chosen(["host", "gemm"], ["host/bmm(a, b)"])] == [
        "bmm(a, b)"
    ]
    assert sum(comparing.attention_rows.VARIED) == 16384
    assert all(r.least == 0.9 for r in comparing.running.chosen(["attention-adversarial"]))
    products = comparing.running.chosen(["gemm"])
    one, many = (
        [replace(r, lists="") for r in products if r.lists == kind] for kind in comparing.gemm.LISTS
    )
    assert (
        one[:6] == products[:6]
        and many[:4] == products[:4]
        and one[6:] == many[4:] == [products[7]]
    )


def test_host_rows(comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("ROUNDS", 2), ("GOES", 1), ("CALLS", 1)):
        monkeypatch.setattr(comparing.host, name, count)
    for name in ("ROUNDS", "NEW", "KNOWN"):
        monkeypatch.setattr(comparing.host_new, name, 2)
    rows = comparing.host.host_rows()
    few = [r for r in rows if not r.name.startswith(("new", "known")) or "bmm" in r.name]
    assert [r.name for r in few[-3:]] == [
        "new extents: bmm, rows",
        "sixteen in a row: a layer of a model, one query",
        "known among 2: bmm, rows",
    ]
    for row in few:
        record = comparing.running.measured(row, session)
        assert not record.failure, record.failure
        alone = row.name.startswith(("call", "its launch"))
        alone |= "of a model" in row.name and find_spec("transformers") is None
        assert [t.name for t in record.timed] == (["ours"] if alone else ["ours", "torch"])
        assert all(len(t.us["host"]) == 2 for t in record.timed)
        if row.limit == comparing.host.CALL_MICROSECONDS:
            assert record.beyond(record.timed[0])[0].startswith("host "), (
                "NumPy takes longer than 4 µs"
            )


def test_cpu_rows(comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns, on all cores; torch's own number of threads comes back."""
    monkeypatch.setattr(comparing.host_cpu, "MOST", 1)
    threads = torch.get_num_threads()
    for row in comparing.running.chosen(["host-cpu"], ["*512*", "gradients B8*"]):
        record = comparing.running.measured(row, session)
        assert not record.failure, record.failure
        assert [(t.name, len(t.us["host"])) for t in record.timed] == [("ours", 1), ("torch", 1)]
        assert record.least == 0.5
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("cores", "clock"), [(1, "thread_time"), (2, "perf_counter")])
def test_one_core_is_timed_by_its_thread(
    cores: int, clock: str, comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cpu, clocks = comparing.host_cpu, list[Any]()
    monkeypatch.setattr(host_cpu.os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(
        host_cpu, "in_turns", lambda runs, clock: clocks.append(clock) or {"ours": [1.0]}
    )
    host_cpu.CpuRow("bmm", lambda: host_cpu._products(1, 2), 0.5).measure(session)
    assert clocks == [getattr(host_cpu.time, clock)]


def test_rows_of_whole_programs(
    comparing: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of little; what ours computes is what torch computes."""
    pytest.importorskip("transformers", reason="Transformers is not installed")
    models = comparing.models
    for name, n in {"ROUNDS": 1, "PROMPT": 5, "NEW_TOKENS": 3, "BATCHES": 2, "LAYERS": 1}.items():
        monkeypatch.setattr(models, name, n)
    monkeypatch.setattr(models, "HEADS", 2)
    monkeypatch.setattr(models, "_nested", models._ours)  # torch's are causal on a GPU alone
    rows = [models.ModelRow("generate", models._generate(1, 16, 32, 32)), *models.model_rows()[2:]]
    for row in rows:
        record = comparing.running.measured(row, session)
        assert not record.failure, record.failure
        assert [(t.name, len(t.us["elapsed"])) for t in record.timed] == [("ours", 1), ("torch", 1)]
    ours, theirs = rows[0].make(session)
    assert (ours() == theirs()).float().mean() > 0.8  # logits of random weights are close


def test_compile_rows(
    comparing: Any, session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a cache of its own, which is gone afterwards."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    from kernelseam.plugins import plugins

    toolchain = plugins().backend("cuda").toolchain
    if toolchain is None or "sm_90a" not in toolchain.archs:
        pytest.skip("nvrtc is missing")
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path / "cache"))
    row = min(
        comparing.running.chosen(["compile"], ["sm_90a gemm_sm90*"]),
        key=lambda r: r.tile.bm * r.tile.bn,
    )
    record = comparing.running.measured(row, session)
    assert not record.failure, record.failure
    (ours,) = record.timed
    assert len(ours.us["cold, CPU"]) == len(ours.us["cold, wall"]) == 1
    assert len(ours.us["disk"]) == comparing.compiling.DISK_READS
    assert ours.us["cold, CPU"][0] > 20 * ours.median("disk")
    assert record.limits == {"cold, CPU": 2.5e6, "disk": 1e3}
    kept = [x for x in (tmp_path / "cache").rglob("*") if x.is_file()]
    assert not [x for x in kept if x.stat().st_size > 4096], kept  # but the compiler's version


def record(
    comparing: Any, name: str, ours: float, peers: dict[str, tuple[float, float]], **options: Any
) -> Any:
    from benchmarks.comparing.results import Record, Timed

    timed = [
        Timed(
            "ours",
            "ours",
            "sm90",
            {"back to back": [ours] * 4, "flushed": [ours * 1.1] * 4},
            2e-3,
            0.4,
        )
    ]
    timed += [
        Timed(n, "peer", "", {"back to back": [x], "flushed": [y]}, 2e-3)
        for n, (x, y) in peers.items()
    ]
    return Record("attention", name, 1e12, 1e9, timed=timed, **options)


class TestResults:
    def test_the_less_of_both_ways_of_the_best_peer_counts(self, comparing: Any) -> None:
        actual = record(comparing, "x", 100, {"FA3": (120, 121), "cuDNN": (130, 115.5)})
        assert actual.counted(actual.timed[0]) == pytest.approx(1.05)
        assert actual.beyond(actual.timed[0]) == []
        slower = record(comparing, "x", 100, {"FA3": (95, 150)}, limits={"flushed": 90.0})
        assert slower.beyond(slower.timed[0]) == [
            "0.950 of the best peer, wanted 1",
            "flushed 110 µs, at most 90",
        ]
        assert (
            record(comparing, "x", 100, {"FA3": (95, 150)}, least=0.9).beyond(slower.timed[0]) == []
        )
        assert (
            actual.timed[0].spread("back to back") == 0
            and actual.timed[1].spread("flushed") is None
        )

    def test_geometric_means(self, comparing: Any) -> None:
        from benchmarks.comparing.results import means

        rows = [record(comparing, "x", 100, {"FA3": (x, 1000)}) for x in (80, 125, 100)]
        rows.append(record(comparing, "failed", 100, {"FA3": (1, 1)}, failure="it is wrong"))
        assert means(rows) == {"attention": {"ours": pytest.approx(1.0)}}

    def test_lines_and_tables(self, comparing: Any) -> None:
        rows = [
            record(comparing, "x", 100, {"FA3": (120, 121)}),
            record(comparing, "y", 2000, {"cuDNN": (1000, 4000)}),
        ]
        rows.append(record(comparing, "z", 1, {}, failure="a | b"))
        assert comparing.tables.line(rows[0]) == (
            "attention/x: ours [sm90] 100.0 / 110.0 µs 10000 TFLOP/s, FA3 120.0 / 121.0 µs (1.20 / "
            "1.10 of ours), error 2.0e-03 (0.40)  [0.0 s]"
        )
        table = comparing.tables.table(rows)
        assert table[0] == (
            "| row | implementation | µs, back to back | µs, flushed | TFLOP/s | GB/s | FA3 / "
            "ours | cuDNN / ours | best peer / ours, the less | error | error / tolerance |"
        )
        assert (
            table[2]
            == "| x | sm90 | 100.0 | 110.0 | 10000 | 10000 | 1.20 / 1.10 | – | 1.10 | 2.0e-03 | "
            "0.40 |"
        )
        assert (
            table[3]
            == "| y | sm90 | 2000 | 2200 | 500 | 500 | – | 0.50 / 1.82 | **0.50** | 2.0e-03 | "
            "0.40 |"
        )
        assert (
            table[4].startswith("| z | FAILED: a / b |")
            and len({line.count("|") for line in table}) == 1
        )
        end = comparing.tables.summary(rows)
        assert end[0] == "attention: geometric mean ours 0.742; least 0.50 of 2 rows"
        assert end[1] == "BELOW attention/y ours: 0.500 of the best peer, wanted 1"
        page = comparing.tables.page({}, rows)
        assert page[-1] == f"- {end[1]}" and "**0.742**" in page[-3]
        assert end[-1] == "3 rows, 1 failed"

    def test_json_grows_and_is_read(self, comparing: Any, tmp_path: Path) -> None:
        path = tmp_path / "run.json"
        head = {
            "device": {
                "name": "H200",
                "driver": "580.1",
                "power_limit_w": 700.0,
                "versions": {"torch": "2.11"},
            }
        }
        log = comparing.running.Log(path, head)
        assert json.loads(path.read_text(encoding="utf-8")) == {"schema": 1, **head, "rows": []}
        rows = [record(comparing, n, 100, {"FA3": (120, 121)}) for n in "xy"]
        for n, row in enumerate(rows, 1):
            log.add(row)
            assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == n
        assert comparing.running.read(path) == (head, rows)
        assert list(tmp_path.iterdir()) == [path]
        page = "\n".join(comparing.tables.page(*comparing.running.read(path)))
        assert (
            page.startswith("H200, driver 580.1, 700 W, torch 2.11.\n")
            and "ours: **1.100**" in page
        )
        path.write_text(json.dumps({"schema": 0, "rows": []}), encoding="utf-8")
        with pytest.raises(ValueError, match="schema 0, not 1: measure again"):
            comparing.running.read(path)

    def test_plots(self, comparing: Any, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra bench")
        from benchmarks.comparing import plots

        rows = [
            record(comparing, "good", 100, {"FA3": (120, 121)}),
            record(comparing, "bad", 100, {"FA3": (80, 121)}),
        ]
        rows.append(record(comparing, "failed", 1, {}, failure="wrong"))
        written = plots.draw(
            {"ceilings": {"copy_gbs": 4000.0, "cublas_tflops": 700.0}}, rows, tmp_path / "plots"
        )
        assert [p.name for p in written] == ["ratios-attention.svg", "roofline.svg"]
        assert all(p.read_text(encoding="utf-8").count("<path") > 10 for p in written)


def test_what_the_driver_says(
    comparing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line of nvidia-smi's, in a stub's words; nothing where there is none."""
    stub = tmp_path / "nvidia-smi"
    answer = {
        "driver_version": "580.65.06",
        "power.limit": "700.00",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
    }
    stub.write_text(
        f"#!{sys.executable}\nimport sys\nanswer = {answer}\nasked = "
        "sys.argv[3].split('=')[1].split(',')\n"
        "print(', '.join(answer.get(x, '[N/A]') for x in asked))\n",
        encoding="utf-8",
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(comparing.machine, "PATIENCE", 60.0)
    assert comparing.machine.asked() == {
        "driver": "580.65.06",
        "power_limit_w": 700.0,
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
    }
    with comparing.machine.sampling("cuda") as readings:
        pass
    assert readings == {"sm_mhz": 1980.0, "memory_mhz": 3201.0}
    monkeypatch.setattr(comparing.machine, "PATIENCE", 0.0)
    with comparing.machine.sampling("cuda") as late:
        pass
    assert late == {}, "nobody waits for a card that is slow to answer"
    stub.unlink()
    assert comparing.machine.asked() == {}
    with comparing.machine.sampling("cuda") as readings:
        pass
    assert readings == {}


@pytest.mark.slow("seconds of timing: test_new_extents_make_few_python_calls takes the same path")
def test_host_time_with_an_idle_driver(tmp_path: Path) -> None:
    """As it is typed, from the repository's root: host times of the path to a GPU, without one."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing")
    given = ["host", "--device", "idle", "--only", "bmm(a, b)", "--json", tmp_path / "run.json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["rows"]
    (ours,) = row["timed"]
    assert len(ours["us"]["host"]) == 5 and 1 < min(ours["us"]["host"]) < 1000


def test_new_extents_make_few_python_calls(
    comparing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the path to a GPU, without one: a count does not depend on the machine. Planning makes
    thousands, a call that comes again fewer than ten."""
    pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing")
    pytest.importorskip("cuda.bindings.nvrtc", reason="nvrtc is missing")
    if shutil.which("cc") is None:
        pytest.skip("a C compiler is missing")
    from benchmarks.comparing import idle_device

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    script = str(Path(__file__).parent / "helpers" / "idle_calls.py")
    done = idle_device.run_with_idle_driver([script], capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    new = {"decode": 21, "causal": 22, "varlen": 22, "matmul2d": 20, "qkv": 30, "gradients": 60}
    new["qkv into pages"] = 45
    new["lists"] = 152  # 64 products
    new |= {"reach": 104, "cap": 106}  # of a function that is traced, and of what it captured
    new |= {"layer": 7, "second layer": 17, "first layer": 22}  # of a model's step
    # the first call of a class, which chooses: half a microsecond each
    first = {"decode": 1170, "causal": 945, "varlen": 935, "paged": 1215, "matmul2d": 532}
    first |= {"gradients": 1635, "lists": 1725, "reach": 950, "qkv": 1220}
    new |= {f"{name}, a class": most for name, most in first.items()} | {"paged": 22}
    assert {n: counts[n] for n, most in new.items() if counts[n] > most} == {}
    again = {"attention again": 7, "bmm again": 8, "torch.attention again": 8}
    again["lists again"] = 16
    assert {n: counts[n] for n, most in again.items() if counts[n] > most} == {}
    # what a call that repeats reads on the device is copied once, and lives with it
    assert counts["lists' copies kept"] == 1
    assert counts["lists' copies again"] == counts["lists' copies"]


def test_the_command(comparing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on the host, and its tables from the JSON; one whose time is up begins no row."""
    pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra bench")
    actual, page, plots = (tmp_path / n for n in ("run.json", "page.md", "plots"))
    given = ["run", "gemm", "--device", "cpu", "--rounds", "1", "--warm", "0"]
    given += ["--only", "384 × 1×64×512 f16 NN"]
    written = ["--json", str(actual), "--report", str(page), "--plots", str(plots)]
    with torch.random.fork_rng(), torch.set_grad_enabled(False):
        assert comparing.command.main([*given, *written]) == 0
        out = capsys.readouterr().out
        assert comparing.command.main([*given, "--seconds", "0"]) == 0
        late = capsys.readouterr().out
    assert "\ngemm/384 × 1×64×512 f16 NN: ours [numpy] " in out and "\n1 rows, 0 failed\n" in out
    assert "the time is up: 1 rows are not measured\n" in late and "\n0 rows, 0 failed\n" in late
    head, rows = comparing.running.read(actual)
    device = head["device"]
    assert (device["name"], device["versions"]["torch"]) == ("cpu", torch.__version__)
    assert len(rows) == 1
    assert "ratios-gemm.svg" in [p.name for p in plots.iterdir()]
    assert comparing.command.main(["table", str(actual)]) == 0
    assert capsys.readouterr().out == page.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["run", "gemm"], ["choices", "--count", "1"]])
def test_a_torch_that_sees_no_gpu_is_said(
    comparing: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"torch \S+ sees no GPU\. Install the torch that is"):
        comparing.command.main(arguments)


@pytest.mark.parametrize(("hip", "wanted"), [(None, "cuda:0"), ("6.4.43484", "rocm:0")])
def test_torch_says_whose_gpu_cuda_is(
    comparing: Any, monkeypatch: pytest.MonkeyPatch, hip: str | None, wanted: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(comparing.rows, "find_device", lambda name: name)
    session = comparing.rows.Session("cuda", comparing.clocks.HostClock())
    assert session.target() == wanted
    assert comparing.rows.Session("cpu", session.clock).target() == "numpy"
    versions = comparing.machine.versions()
    assert versions.get("hip") == hip and ("cuda" in versions) == (hip is None)
