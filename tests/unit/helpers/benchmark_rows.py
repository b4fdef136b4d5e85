"""The benchmarks' rows on the host, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.comparing import attention, rows, running, timing
from benchmarks.comparing.clocks import HostClock
from benchmarks.comparing.results import Record


@pytest.fixture(name="session")
def host_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[rows.Session]:
    """On the host, where torch's plain attention stands for FlashAttention-2; gradients are off, as
    in a run."""
    monkeypatch.setitem(attention.TORCH_PEERS, "FA2", SDPBackend.MATH)
    settings = timing.Settings(rounds=2, warm_seconds=0, burst_seconds=1e-4, most_flushed=2)
    with torch.no_grad():
        torch.manual_seed(0)
        yield rows.Session("cpu", HostClock(), settings, ("numpy", "nosuch"))


def measured(session: rows.Session, row: Any) -> tuple[Record, rows.Prepared, rows.Contestant]:
    """The row's record, which has no failure; prepared once more, and its first contestant, which
    has run and is right."""
    assert running.compile_ahead([row], session) == [], "the host has nothing to compile"
    record = running.measured(row, session)
    assert not record.failure, record.failure
    worst = record.of("ours")[0].worst
    assert worst is not None and worst <= 1
    prepared: rows.Prepared = row.prepare(session)
    contestant = prepared.contestants[0]
    contestant.run()
    assert contestant.result is not None
    assert prepared.judge(contestant.result()).worst <= 1
    return record, prepared, contestant


def judged(session: rows.Session, row: Any, *shape: int) -> Record:
    """The row's record; its results have this shape, where one is given, and a wrong last element
    is found."""
    record, prepared, contestant = measured(session, row)
    assert contestant.result is not None
    wrong = contestant.result().clone()
    assert not shape or wrong.shape == shape
    wrong[tuple(n - 1 for n in wrong.shape)] += 1
    assert prepared.judge(wrong).worst > 1
    return record


def attention_row(*problem: Any, **options: Any) -> attention.AttentionRow:
    return attention.AttentionRow("attention", *problem, **options)
