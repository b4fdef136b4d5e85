"""How the benchmarks take times, on a clock that is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
from benchmarks.comparing import clocks, host_cpu, rows, timing  # noqa: E402


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
    def test_in_turns(self) -> None:
        """Each round asks everyone, from another one on each time; bursts are of one length."""
        settings = timing.Settings(rounds=3, warm_seconds=0.1, burst_seconds=0.01, most_flushed=4)
        clock = ToldClock({a: 1000.0, b: 5000.0})
        actual, captured = timing.measure(
            {"a": timing.Turn(a), "b": timing.Turn(b)}, clock, settings
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

    def test_the_card_is_warm_first(self) -> None:
        settings = timing.Settings(rounds=1, warm_seconds=0.5, burst_seconds=0.01)
        clock = ToldClock({a: 1000.0, b: 2000.0})
        timing.measure({"a": timing.Turn(a), "b": timing.Turn(b)}, clock, settings)
        before = sum(count * {"a": 1e-3, "b": 2e-3}[name] for name, count in clock.asked[:-4])
        assert 0.5 <= before < 0.55

    def test_what_drifts_hits_all_alike(self) -> None:
        """A clock that falls by a tenth over the run leaves the ratio alone."""
        settings = timing.Settings(rounds=20, warm_seconds=0, burst_seconds=0.01, most_flushed=1)
        clock = ToldClock({a: 1000.0, b: 1000.0}, drift=0.1 / 460)
        actual, _ = timing.measure({"a": timing.Turn(a), "b": timing.Turn(b)}, clock, settings)
        mine, theirs = (np.median(actual[n].back_to_back) for n in "ab")
        assert actual["a"].back_to_back[-1] / actual["a"].back_to_back[0] > 1.08
        assert theirs / mine == pytest.approx(1, abs=3e-3)

    def test_short_launches_are_replayed(self) -> None:
        """All of them, if one is short; none, if one cannot be captured."""
        turns = {"a": timing.Turn(a), "b": timing.Turn(b)}
        settings = timing.Settings(rounds=2, warm_seconds=0, burst_seconds=0.01)
        clock = ToldClock({a: 5.0, b: 50.0})
        actual, captured = timing.measure(turns, clock, settings)
        assert captured and ("a graph", 100) in clock.asked and ("b graph", 10) in clock.asked
        assert actual["a"].back_to_back == pytest.approx([5e-6] * 2)
        _, captured = timing.measure(turns, ToldClock({a: 5.0, b: 50.0}, capturing=False), settings)
        assert not captured
        _, captured = timing.measure(turns, ToldClock({a: 125.0, b: 150.0}), settings)
        assert not captured

    def test_what_selects_is_entered_for_a_burst(self) -> None:
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

        settings = timing.Settings(rounds=3, warm_seconds=0)
        timing.measure({"x": timing.Turn(run, around)}, ToldClock({run: 900.0}), settings)
        assert entered == ["in", "out"] * (2 + 2 * 3)


@pytest.mark.parametrize(("cores", "clock"), [(1, "thread_time"), (2, "perf_counter")])
def test_one_core_is_timed_by_its_thread(
    cores: int, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(host_cpu.os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(
        host_cpu, "in_turns", lambda runs, clock: asked.append(clock) or {"ours": [1.0]}
    )
    host_cpu.CpuRow("bmm", lambda: host_cpu._products(1, 2), 0.5).measure(
        rows.Session("cpu", clocks.HostClock())
    )
    assert asked == [getattr(host_cpu.time, clock)]
