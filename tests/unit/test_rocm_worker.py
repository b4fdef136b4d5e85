"""The compile server: values and errors come back, whatever ends a child ends nobody else, and it
outlives no one."""

from __future__ import annotations

import math
import operator
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernelseam.errors import CompileError, InvalidValue, UnknownName

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
from interruption import interrupted  # noqa: E402
from kernelseam_rocm import toolchain, worker  # noqa: E402
from kernelseam_rocm.worker import CompileServer, WorkerDied  # noqa: E402


@pytest.fixture
def server() -> Iterator[CompileServer]:
    started = CompileServer()
    yield started
    if started._requests is not None:
        started._requests.close()  # which ends it


def refuse() -> None:
    raise InvalidValue("field", 1, "must be 2", "Make it so")


def without_library() -> None:
    raise RuntimeError("no library here")


def write_and_abort() -> None:
    os.write(1, b"said on standard output\n")
    os.write(2, b"LLVM ERROR: Cannot select\n")
    os.abort()


def leave() -> None:
    os._exit(7)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_each_request_has_a_child_of_the_one_server(server: CompileServer) -> None:
    parents = {server.run(os.getppid) for _ in range(3)}
    children = [server.run(os.getpid) for _ in range(3)]
    assert len(parents) == 1 and len(set(children)) == 3
    assert os.getpid() not in parents


def test_values_go_both_ways(server: CompileServer) -> None:
    assert server.run(math.hypot, 3.0, 4.0) == 5.0
    assert server.run(operator.mul, b"\0\xff", 500_000) == b"\0\xff" * 500_000


def test_an_exception_comes_back_as_itself(server: CompileServer) -> None:
    with pytest.raises(InvalidValue) as caught:
        server.run(refuse)
    assert str(caught.value) == "field = 1: must be 2. Make it so."
    with pytest.raises(ZeroDivisionError):
        server.run(operator.truediv, 1, 0)


def test_an_abort_ends_the_child_alone(server: CompileServer) -> None:
    before = server.run(os.getppid)
    with pytest.raises(WorkerDied) as caught:
        server.run(write_and_abort)
    assert caught.value.signal == "SIGABRT"
    assert caught.value.reason == "the compiler ended its process with SIGABRT"
    assert "said on standard output\nLLVM ERROR: Cannot select\n" in caught.value.log
    assert server.run(os.getppid) == before


def test_an_exit_without_an_answer_is_reported(server: CompileServer) -> None:
    with pytest.raises(
        WorkerDied, match="the compiler ended its process with exit status 7"
    ) as caught:
        server.run(leave)
    assert (caught.value.signal, caught.value.log) == ("", "")


def test_a_request_that_never_ends_is_ended(
    server: CompileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TIME_LIMIT", 1)  # before the server is forked
    with pytest.raises(WorkerDied, match="SIGALRM after its time limit of 1 s"):
        server.run(time.sleep, 60)


def test_a_server_that_was_killed_is_started_again(server: CompileServer) -> None:
    pid = server.run(os.getppid)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    with pytest.raises(WorkerDied, match="the compile server was ended from outside"):
        server.run(os.getpid)
    assert server.run(os.getppid) != pid


def say_and_wait(path: str) -> str:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)
    return "the answer to the request that was interrupted"


def test_an_interrupted_request_leaves_no_answer_to_the_next(
    server: CompileServer, tmp_path: Path
) -> None:
    before = server.run(os.getppid)
    with interrupted(0.5):
        server.run(say_and_wait, str(tmp_path / "pid"))
    assert server.run(operator.mul, 6, 7) == 42
    assert gone(before) and gone(int((tmp_path / "pid").read_text())), (
        "nobody wants what they are at"
    )
    with interrupted(0.5):  # this one answers, but nobody has read it yet
        server.run(time.sleep, 0.4)
        time.sleep(0.4)
    assert [server.run(operator.mul, n, 7) for n in range(3)] == [0, 7, 14]


def test_an_answer_to_another_request_is_no_answer(server: CompileServer) -> None:
    server.start()
    assert server._requests is not None
    server._requests._count += 1  # as if an answer had been lost
    server._requests._connection.send_bytes(
        struct.pack("<Q", 1) + pickle.dumps((operator.mul, (2, 3)))
    )
    with pytest.raises(WorkerDied, match="the compile server was ended from outside"):
        server.run(operator.mul, 4, 5)
    assert server.run(operator.mul, 4, 5) == 20


def test_a_forked_copy_starts_a_server_of_its_own(server: CompileServer) -> None:
    mine = server.run(os.getppid)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(server.run(os.getppid)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) != mine
    assert server.run(os.getppid) == mine
    os.close(read)
    os.close(write)


def test_the_server_ends_with_its_owner_and_holds_nothing_of_it() -> None:
    code = (
        "import os, sys; from kernelseam_rocm.worker import server; "
        "print(server().run(os.getppid), flush=True); sys.stdin.read(1); os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.stdin.write(b"x")
        owner.stdin.flush()
        assert owner.stdout.read() == b""  # comes only when nobody holds the pipe any more
    assert gone(pid)


def test_in_the_toolchain_a_death_is_a_compile_error(
    monkeypatch: pytest.MonkeyPatch, server: CompileServer
) -> None:
    monkeypatch.setattr(worker, "server", lambda: server)
    with pytest.raises(CompileError) as caught:
        toolchain.in_child("k", "gfx942", write_and_abort)
    assert (caught.value.kernel, caught.value.arch) == ("k", "gfx942")
    assert str(caught.value).startswith(
        "k did not compile for gfx942.\nthe compiler ended its process with SIGABRT. Its output:\n"
    )
    assert "LLVM ERROR: Cannot select" in caught.value.log
    with pytest.raises(CompileError, match="hiprtc cannot be used: no library here"):
        toolchain.in_child("k", "gfx942", without_library)


def test_an_arch_that_is_not_in_the_table_never_reaches_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kernelseam.contract import SourceBundle
    from kernelseam_rocm.plugin import backend

    monkeypatch.setattr(worker, "server", lambda: pytest.fail("the compiler was asked"))
    actual = backend().toolchain
    assert actual is not None
    with pytest.raises(UnknownName) as caught:
        actual.compile(SourceBundle("k", "k.h", (("k.h", ""),), ()), "gfx000")
    assert str(caught.value) == (
        "arch = gfx000: must be one of gfx90a, gfx942, gfx950, gfx1100, gfx1151, gfx1200, gfx1201. "
        "Name one of these, or add a row to kernelseam_rocm.archs."
    )


# ---------------------------------------------------------------- by a program of a folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose program starts others as they are, and says that it did."""
    program = tmp_path / "run"
    program.write_text('#!/bin/sh\nexport BY_THE_FOLDER=yes\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv(worker.VARIABLE, str(tmp_path))
    monkeypatch.delenv("KERNELSEAM_HIP_RUN", raising=False)
    return tmp_path


def test_a_folders_program_starts_the_server(folder: Path, server: CompileServer) -> None:
    assert server.run(os.getenv, "BY_THE_FOLDER") == "yes" and "BY_THE_FOLDER" not in os.environ
    assert server.run(math.factorial, 5) == 120
    first = server._pid
    with pytest.raises(ZeroDivisionError):
        server.run(operator.truediv, 1, 0)
    with pytest.raises(WorkerDied, match="SIGABRT") as died:
        server.run(os.abort)
    assert died.value.signal == "SIGABRT" and server._pid == first and alive(first)
    assert server.run(os.getpgid, 0) == first, "the server's own group, which is ended as one"


def test_it_ends_with_its_owner(folder: Path) -> None:
    code = (
        "import math, os, sys; from kernelseam_rocm.worker import CompileServer\n"
        "s = CompileServer(); s.run(math.factorial, 5); print(s._pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    pid, until = int(done.stdout), time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def test_which_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.launcher() == folder / "run"
    monkeypatch.setenv("KERNELSEAM_HIP_RUN", str(folder / "run"))
    assert worker.launcher() is None, "this process was started by it"
    monkeypatch.setenv("KERNELSEAM_HIP_RUN", "/nowhere/run")
    assert worker.launcher() == folder / "run"
    (folder / "run").chmod(0o644)
    with pytest.raises(InvalidValue) as refused:
        worker.launcher()
    assert str(refused.value) == (
        f"KERNELSEAM_HIP = {folder}: must be a folder with a program `run`. Make it in a "
        f"checkout: `tools/get-hiprtc.sh {folder}`."
    )
    monkeypatch.delenv(worker.VARIABLE)
    assert worker.launcher() is None
