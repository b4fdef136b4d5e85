"""Processes that compute for this one: what they bring, and that one that dies or hangs harms
nobody else."""

from __future__ import annotations

import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interruption import interrupted
from kernelseam.parity.running import workers
from kernelseam.parity.running.workers import WorkerFailed, Workers


@pytest.fixture(scope="module")
def team() -> Iterator[Workers]:
    """Two processes for all tests: those that are lost are replaced."""
    result = Workers(2, limit=30)
    yield result
    result.close()


def test_results_and_what_was_raised(team: Workers) -> None:
    tasks = [team.start(math.factorial, n) for n in range(8)]
    assert [t.result() for t in tasks] == [math.factorial(n) for n in range(8)]
    with pytest.raises(ZeroDivisionError):
        team.start(operator.truediv, 1, 0).result()
    # What the work itself raises is no time limit of ours.
    with pytest.raises(TimeoutError, match="the lock"):
        team.start(exec, "raise TimeoutError('the lock')").result()


def test_array_libraries_have_one_thread_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    team = Workers(1, limit=30)
    actual = [
        team.start(os.getenv, n).result() for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    ]
    team.close()
    assert actual == ["3", "1"], "what the user chose stays"
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_a_process_that_dies_costs_its_task_alone(team: Workers) -> None:
    before = [team.start(math.factorial, n) for n in range(5)]
    bad = team.start(os._exit, 3)
    after = [team.start(math.factorial, n) for n in range(5)]
    with pytest.raises(
        WorkerFailed, match="^its process ended with status 3; so did the one before it$"
    ):
        bad.result()
    assert [t.result() for t in (*before, *after)] == [math.factorial(n) for n in range(5)] * 2
    assert team.start(math.factorial, 6).result() == 720, "new work finds a new process"


def test_what_a_process_was_at_when_it_was_killed_is_done_again(team: Workers) -> None:
    """In the middle of its answer, as like as not."""
    pids = {t.result() for t in [team.start(os.getpid) for _ in range(50)]}
    actual = [team.start(bytes, 50_000_000) for _ in range(4)]
    time.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert [len(t.result()) for t in actual] == [50_000_000] * 4
    assert not {team.start(os.getpid).result()} & pids


def test_a_process_that_was_killed_at_rest_is_replaced(team: Workers) -> None:
    pid = team._ask(os.getpid, ())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(workers._ProcessEnded, match="^its process ended with status -9$"):
        team._ask(math.factorial, (5,))
    assert team._ask(math.factorial, (5,)) == 120
    assert team.start(math.factorial, 6).result() == 720


def test_a_process_that_hangs_costs_its_task_alone() -> None:
    team = Workers(1, limit=4)
    try:
        slow, waits = team.start(time.sleep, 600), team.start(os.getpid)
        start = time.perf_counter()
        with pytest.raises(
            WorkerFailed, match="^its process gave no answer within 4 s; so did the one before it$"
        ):
            slow.result()
        pid = waits.result()
        os.kill(pid, signal.SIGSTOP)
        assert team.start(os.getpid).result() != pid, (
            "one that was stopped is replaced, and its task done"
        )
        assert time.perf_counter() - start < 60
    finally:
        team.close()


def test_what_cannot_be_sent_is_an_error(team: Workers) -> None:
    with pytest.raises(TypeError, match="^its result cannot be sent: "):
        team.start(threading.Lock).result()
    with pytest.raises(TypeError, match="cannot pickle"):
        team.start(len, threading.Lock()).result()
    assert team.start(math.factorial, 4).result() == 24


def test_an_interrupted_task_leaves_no_answer_to_the_next(team: Workers) -> None:
    pid = team._ask(os.getpid, ())
    with interrupted(0.3):
        team._ask(time.sleep, (0.5,))
    time.sleep(0.4)
    assert team._ask(math.factorial, (5,)) == 120
    assert team._ask(os.getpid, ()) != pid


def test_closing_ends_what_hangs() -> None:
    team = Workers(1, limit=60)
    pid = team.start(os.getpid).result()
    team.start(time.sleep, 600)
    team.close()
    assert _ended(pid)


def test_workers_end_with_a_killed_parent() -> None:
    """Else they would hold its output open for ever."""
    script = (
        "import os, signal; from kernelseam.parity.running.workers import Workers\n"
        "team = Workers(1, 60); print(team.start(os.getpid).result(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    assert _ended(int(done.stdout))


def _ended(pid: int) -> bool:
    """Within 20 s."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # ended, and nobody has asked for its status yet
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("quota", "most"), [("150000 100000", 2), ("max 100000", 64), ("5000 100000", 1), (None, 64)]
)
def test_cores_are_those_the_container_is_given(
    quota: str | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    monkeypatch.setattr(workers, "QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert workers.cores() == most
