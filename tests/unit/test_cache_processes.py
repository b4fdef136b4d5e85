"""The binary cache under many processes and threads, of which any may be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import pytest
from fakecc import BUNDLE, Toolchain, again, made, quietly
from kernelseam import compilation
from kernelseam.compilation import CacheWarning, build, bundled, compiled

FORK = multiprocessing.get_context("fork")


def _ask(toolchain: Toolchain, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.put(compiled(toolchain, BUNDLE, "arch1"))


def test_many_processes_on_a_cold_key_compile_once(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = lambda: time.sleep(0.3)
    barrier, answers = FORK.Barrier(32), FORK.Queue()
    processes = [FORK.Process(target=_ask, args=(toolchain, barrier, answers)) for _ in range(32)]
    for p in processes:
        p.start()
    actual = [answers.get(timeout=60) for _ in processes]
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0] * 32
    assert toolchain.runs == 1
    assert len({b.data for b in actual}) == 1 and all(b.path is not None for b in actual)


def test_eight_threads_on_a_cold_key_compile_once(cache: Path, toolchain: Toolchain) -> None:
    toolchain.work = lambda: time.sleep(0.1)
    actual: list[compilation.Binary] = []
    threads = [
        threading.Thread(target=lambda: actual.append(compiled(toolchain, BUNDLE, "arch1")))
        for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert toolchain.runs == 1
    assert len(actual) == 8 and len({id(b) for b in actual}) == 1


def test_clearing_beside_a_build_leaves_what_it_writes(
    cache: Path,
    toolchain: Toolchain,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    folder, replace = cache / "binaries", os.replace
    killed = [folder / f"{'0' * 64}.abc.tmp", folder / f"{'0' * 64}.lock"]

    def replace_cleared(source: str, target: Path) -> None:
        for path in killed:
            path.write_bytes(b"of a build that was killed")
        assert compilation.clear().binaries == 0
        names = sorted(p.suffix for p in folder.iterdir())
        assert names == [".lock", ".tmp"] and not any(p.exists() for p in killed)
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_cleared)
        binary = compiled(toolchain, BUNDLE, "arch1")
    assert binary.path is not None and binary.path.exists() and not recwarn.list
    assert compilation.clear().binaries == 1 and not list(folder.iterdir())


def test_waiting_for_a_lock_ends(
    cache: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = again(toolchain).key
    path = cache / "binaries" / f"{key}.bin"
    path.unlink()
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.1)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with filelock.FileLock(path.with_suffix(".lock")):
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        with pytest.warns(CacheWarning, match="compiling without the binary cache"):
            assert again(toolchain).path is None
    finally:
        let_go.set()
        thread.join()
    assert toolchain.runs == 2


# ---------------------------------------------------------------- killed


def test_a_killed_build_leaves_no_lock_and_no_entry(cache: Path, toolchain: Toolchain) -> None:
    slow = Toolchain(toolchain.notes, lambda: time.sleep(600))
    process = FORK.Process(target=compiled, args=(slow, BUNDLE, "arch1"))
    process.start()
    deadline = time.monotonic() + 60
    while not slow.runs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert compilation.entries() == []
    start = time.monotonic()
    binary = quietly(toolchain)
    assert time.monotonic() - start < 5
    assert toolchain.runs == 2 and binary.path is not None and binary.path.exists()


def test_a_write_cut_short_leaves_nothing_to_load_and_is_swept_up(
    cache: Path, toolchain: Toolchain
) -> None:
    key = quietly(toolchain).key
    path = cache / "binaries" / f"{key}.bin"
    # as a process killed between write and rename leaves it
    path.rename(path.with_name(f"{key}.abc.tmp"))
    quietly(toolchain)
    assert toolchain.runs == 2
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".bin", ".lock"]


def test_a_build_killed_with_its_compiler_leaves_no_lock(
    cache: Path, toolchain: Toolchain, tmp_path: Path
) -> None:
    """A compiler that is a process of its own may outlive the build; the lock must not live on in
    it."""
    child = tmp_path / "child"

    def work() -> None:
        compiler = subprocess.Popen(["sleep", "60"])
        child.write_text(str(compiler.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(
        target=compiled, args=(Toolchain(toolchain.notes, work), BUNDLE, "arch1")
    )
    process.start()
    process.join(60)
    try:
        os.kill(int(child.read_text()), 0)  # it lives
        _recovered(cache, toolchain)
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


READS = ("getpid", "fspath", "lstat", "stat", "fstat", "geteuid", "scandir", "_path_normpath")
"""Functions that change nothing: killed before one, a build leaves what it does before the call
behind it."""
SYSTEM = ("posix", "fcntl", "_io")
"""Modules whose functions and methods reach the system."""
TRACED = ("kernelseam", "filelock")
"""Packages whose lines are steps. Between the lines of what they call, such as pathlib, the system
is reached by ``SYSTEM`` alone."""


def _kill_before(step: int, every: str, toolchain: Toolchain) -> int | None:
    """Build in a child process that is killed before its ``step``-th system call that may change
    something, or line of Python.

    Returns the number of steps, or None if the child was killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def counted(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            system = (
                event == "c_call"
                and (argument.__module__ or type(argument.__self__).__module__) in SYSTEM
                and argument.__name__ not in READS
            )
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if system or (event == "line" and package in TRACED):
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return counted

        start = sys.setprofile if every == "call" else sys.settrace
        status = 1
        try:
            start(counted)
            compiled(toolchain, BUNDLE, "arch1")
            start(None)
            os.write(writing, str(count).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        counted = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0
    return int(counted)


def _recovered(cache: Path, toolchain: Toolchain) -> None:
    """Whatever a killed build left: the next one is not kept waiting, is right, and leaves only
    what it should."""
    start = time.monotonic()
    binary = quietly(toolchain)
    assert time.monotonic() - start < 5
    assert binary.data == made(BUNDLE, "arch1", binary.key)
    assert binary.path is not None and quietly(toolchain) == binary
    with filelock.FileLock(binary.path.with_suffix(".lock"), timeout=0):
        assert {p.name for p in cache.rglob("*")} == {
            "binaries",
            f"{binary.key}.bin",
            f"{binary.key}.lock",
        }


@pytest.mark.parametrize(
    "every", ["call", pytest.param("line", marks=pytest.mark.slow("a process a line"))]
)
def test_a_build_killed_at_any_step_harms_nobody(
    cache: Path, toolchain: Toolchain, every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quietly(toolchain)  # modules are imported at their first use
    # Reading the metadata of all installed distributions takes most of a build's steps and
    # writes nothing: the result is kept.
    monkeypatch.setattr(bundled, "forget", lambda: None)
    shutil.rmtree(cache)
    compilation.forget()
    steps = _kill_before(0, every, toolchain)
    assert steps is not None and steps > 15
    places = {"nothing": 0, "half-written": 0, "written": 0}
    for step in range(1, steps + 1):
        shutil.rmtree(cache, ignore_errors=True)
        compilation.forget()
        assert _kill_before(step, every, toolchain) is None, (
            f"step {step} of {steps} was not reached"
        )
        left = {p.suffix for p in cache.rglob("*")} if cache.exists() else set()
        places[
            "written" if ".bin" in left else "half-written" if ".tmp" in left else "nothing"
        ] += 1
        _recovered(cache, toolchain)
    assert min(places.values()) > 1, places  # the kills were spread over the build


def test_a_build_killed_amid_its_write_harms_nobody(cache: Path, toolchain: Toolchain) -> None:
    """The kernel itself ends the write after so many bytes, and the process with it."""

    def build_up_to(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        compiled(toolchain, BUNDLE, "arch1")

    whole = quietly(toolchain)
    assert whole.path is not None
    size = whole.path.stat().st_size
    for written in (200, 1000, len(whole.data), len(whole.data) + 10, size - 1):
        whole.path.unlink()
        compilation.forget()
        process = FORK.Process(target=build_up_to, args=(written,))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGXFSZ
        (left,) = cache.rglob("*.tmp")
        assert left.stat().st_size == written
        _recovered(cache, toolchain)
