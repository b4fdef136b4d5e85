"""``python -m benchmarks choices`` without a GPU: which problems are drawn, which configurations
are measured, what a choice's regret is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernelseam import absent
from kernelseam.dispatch import select
from kernelseam.samples.common import UNFUSED

torch = pytest.importorskip("torch", reason="torch is missing: the benchmarks' clock and memory")
from benchmarks.comparing import choices, drawing  # noqa: E402
from benchmarks.comparing.clocks import HostClock  # noqa: E402
from benchmarks.comparing.rows import Session  # noqa: E402


@pytest.fixture
def session() -> Any:
    return Session("cpu", HostClock())


def test_a_seeds_problems_are_the_same_and_bounded() -> None:
    drawn = drawing.drawn((), 100, 3)
    assert drawn == drawing.drawn(drawing.KINDS, 100, 3)
    assert drawn[:50] == drawing.drawn((), 50, 3)
    assert drawn != drawing.drawn((), 100, 4)
    assert all(r.bytes <= drawing.MOST_BYTES for r in drawn)
    assert {r.suite for r in drawn} == {
        *("dense", "packed", "small", "few"),
        *("decode", "paged", "backward"),
        *("gemm", "epilogue", "grouped"),
    }
    with pytest.raises(SystemExit, match="no kind of problem is conv: choose of attention, small"):
        drawing.drawn(["gemm", "conv"], 2, 3)


def test_rows_of_any_spec(
    session: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by seed and number, whatever the count; each kind's extents and options vary, and
    dispatch takes each on a Hopper device that is not here."""
    from benchmarks.comparing import command

    rows = drawing.drawn_rows((), 60, 3)
    assert [r.name for r in rows[:20]] == [r.name for r in drawing.drawn_rows((), 20, 3)]
    assert {r.name.split(":")[0] for r in rows} == {f"3.{i}" for i in range(60)}
    assert all(r.row.least == 0.95 and r.suite == "drawn" for r in rows)
    attention = [r.row for r in rows if isinstance(r.row, drawing.AttentionRow)]
    assert {r.suite for r in attention} == {"dense", "packed"}
    assert len({r.D for r in attention}) > 4 and len({r.heads // r.of_keys for r in attention}) > 3
    assert any(r.window or r.softcap or r.sinks for r in attention)
    assert {r.page for r in (r.row for r in rows) if isinstance(r, drawing.PagedRow)} > {16}
    elsewhere = replace(session, planned_for=absent.product("H200"))
    for row in rows:
        for descriptor in row.planned(elsewhere):
            assert select(descriptor.simplified()[0].problem(), elsewhere.target()).implementation
    assert command.main(["rows", "drawn", "--seed", "3", "--count", "9", "--kind", "gemm"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 9 and listed[0].startswith("drawn/3.7: ")
    with pytest.raises(SystemExit, match="are of the suite drawn, which is not among gemm"):
        command.main(["rows", "gemm", "--seed", "3"])
    assert listed[1] == f"drawn/{rows[17].name}"
    assert listed == [f"drawn/{r.name}" for r in drawing.drawn_rows(["gemm"], 9, 3)]


def test_every_tile_of_an_arch_is_asked(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper device that is not here: the choice, then other implementations and tiles that
    are not predicted to take more than BEYOND times as long."""
    device = absent.product("sm_90a")
    monkeypatch.setattr(type(session), "target", lambda self: device)
    row = drawing.AttentionRow("dense", 4, 16, 512, 128, True)
    question = choices.Question.of(row, session)
    assert question.choice.implementation.name == "sm90"
    assert any(name.startswith("shared:") for name in question.others)
    assert question.taken.startswith("sm90:128x128-") and question.taken not in question.others
    assert "sm90" not in question.others and "shared" not in question.others
    assert list(question.predicted) == ["sm90", *question.others]
    most = choices.BEYOND * question.predicted["sm90"]
    assert 0 < min(question.predicted.values()) <= max(question.predicted.values()) <= most
    assert UNFUSED not in question.others, "a last resort is not asked where others take it"
    monkeypatch.setattr(choices, "BEYOND", 1.0)
    assert set(choices.Question.of(row, session).others) < set(question.others)


def test_gradients_are_asked_of_their_own_problem(session: Any) -> None:
    row = drawing.BackwardRow(1, 2, 32, 64)
    assert choices.Question.of(row, session).problem.operation == "attention_bwd"


def test_a_record_on_the_host(session: Any) -> None:
    with torch.no_grad():
        record = choices.answered(
            choices.Question.of(drawing.GemmRow("gemm", 2, 8, 16, 24, "float32"), session), session
        )
    assert [t.implementation for t in record.timed] == ["numpy"]
    assert choices.again([], [record]) == []
    assert choices.regret(record) == 0.0
    assert choices.line(record).startswith("   0.0 %  gemm/2 × 8×16×24 f32 NN: numpy ")


def test_regret_and_summary() -> None:
    def timed(name: str, us: float) -> Any:
        return choices.Timed(name, "ours", name, {choices.BACK_TO_BACK: [us, us, us]})

    one = choices.Record("dense", "one", timed=[timed("sm90", 12.5), timed("shared:a", 10.0)])
    two = choices.Record("gemm", "two", timed=[timed("shared", 10.0), timed("cublas", 10.2)])
    lost = choices.Record("gemm", "three", failure="Wrong: cublas differs from shared by 1.00e+00")
    assert choices.regret(one) == pytest.approx(0.25) and choices.regret(two) == 0.0
    page = choices.summary([one, two, lost])
    assert "| dense | 1 | 0 % | 1 | 25.0 % | 25 % |" in page
    assert "| gemm | 1 | 100 % | 0 | 0.0 % | 0 % |" in page
    assert "| all | 2 | 50 % | 1 | 12.5 % | 25 % |" in page
    assert page[-2:] == [
        "  25.0 %  dense/one: sm90 12.5 µs; shared:a 10.0 µs",
        "FAILED gemm/three: Wrong: cublas differs from shared by 1.00e+00",
    ]
    assert choices.summary([replace(one, timed=one.timed[1:])])[-1] == ""


def test_todays_choices_by_the_times_of_an_earlier_run(
    session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tile that dispatch takes comes first; one that was not measured is no regret of 0."""
    from benchmarks.comparing import command, running

    elsewhere = replace(session, planned_for=absent.product("H200"))
    asked = choices.questions(drawing.drawn(["attention"], 2, 5), elsewhere)
    assert all(q.taken.partition(":")[2] for q in asked), "of Hopper's device, with their tiles"

    def timed(name: str, us: float) -> Any:
        return choices.Timed(name, "ours", name, {choices.BACK_TO_BACK: [us, us, us]})

    first, second = asked
    log = running.Log(tmp_path / "run.json", {"device": {"name": "NVIDIA H200"}})
    log.add(
        choices.Record(
            first.row.suite, first.row.name, timed=[timed("a", 10.0), timed(first.taken, 12.0)]
        )
    )
    log.add(choices.Record(second.row.suite, second.row.name, timed=[timed("a", 10.0)]))
    records = choices.again(asked, log.records)
    assert choices.regret(records[0]) == pytest.approx(0.2)
    assert records[1].failure == f"{second.taken} was not measured"
    given = [
        "--count",
        "2",
        "--seed",
        "5",
        "--kind",
        "attention",
        "--again",
        str(tmp_path / "run.json"),
    ]
    with torch.random.fork_rng(), torch.set_grad_enabled(False):  # the command sets both
        assert command.main(["choices", *given]) == 0
    page = capsys.readouterr().out
    assert f"  20.0 %  {first.row.suite}/{first.row.name}: {first.taken} 12.0 µs; a 10.0 µs" in page
    assert "Times of an earlier run, run.json; the choices are those of today." in page
