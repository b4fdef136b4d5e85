"""Forks beside threads that are at work: the child never waits for a lock that only they could
release."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import kernelseam
import numpy as np
import pytest
from kernelseam.contract import SourceBundle, Toolchain
from kernelseam.errors import CompileError
from kernelseam.forking import ForkGate, cached_property, new_lock

LIMIT = 20
"""Seconds that a child has."""


def in_child(work: Callable[[], object]) -> int:
    """Fork, and do the work there: the child's wait status. It is killed where it comes to no
    end."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@contextmanager
def beside(work: Callable[[int], object], threads: int) -> Iterator[None]:
    """While so many threads do the work again and again, switching as often as Python can."""
    end, interval = threading.Event(), sys.getswitchinterval()

    def again(number: int) -> None:
        while not end.is_set():
            work(number)

    team = [threading.Thread(target=again, args=(i,)) for i in range(threads)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in team:
            thread.start()
        yield
    finally:
        end.set()
        sys.setswitchinterval(interval)
        for thread in team:
            thread.join()


def attend(sizes: np.random.Generator) -> None:
    """An attention of a size that is seldom the one before, so that it is planned."""
    heads, rows, dim = (int(n) for n in sizes.integers(1, (4, 60, 64)))
    ones = np.ones((2, heads, rows, dim), np.float32)
    assert np.allclose(kernelseam.attention(ones, ones, ones, causal=True, backend="numpy"), 1)


def test_a_child_forked_while_threads_plan_can_plan() -> None:
    sizes = [np.random.default_rng(seed) for seed in range(9)]
    attend(sizes[8])
    with beside(lambda number: attend(sizes[number]), threads=8):
        ends = []
        for _ in range(4):
            time.sleep(0.01)
            ends.append(in_child(lambda: [attend(sizes[8]) for _ in range(5)]))
    assert ends == [0] * 4


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    lock, held, let_go = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_child(lambda: lock.__enter__()) == 0
        assert lock.locked()  # and here it is held as before
    finally:
        let_go.set()
        thread.join()


def test_a_value_is_computed_once_and_without_a_lock() -> None:
    class Slow:
        runs = 0

        @cached_property
        def value(self) -> int:
            """A number."""
            type(self).runs += 1
            started.set()
            assert let_go.wait(60)
            return 7

    slow, started, let_go = Slow(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert started.wait(60)

    def compute() -> None:
        let_go.set()
        assert Slow().value == 7

    try:
        assert in_child(compute) == 0
    finally:
        let_go.set()
        thread.join()
    assert (slow.value, slow.value, Slow.runs) == (7, 7, 1)
    assert Slow.value.__doc__ == "A number." and slow.__dict__ == {"value": 7}


def test_a_fork_waits_for_other_threads_at_work_and_keeps_new_ones_out() -> None:
    gate, inside, let_go = ForkGate(), threading.Event(), threading.Event()
    seen: list[str] = []

    def hold() -> None:
        with gate.work():
            inside.set()
            assert let_go.wait(60)
            seen.append("left")

    def come() -> None:
        with gate.work():
            seen.append("came")

    def fork() -> None:
        with gate.work():  # its own work it does not wait for
            status = in_child(lambda: gate.work().__enter__())
            seen.append(f"forked {status}")

    holder, forker, newcomer = (threading.Thread(target=work) for work in (hold, fork, come))
    holder.start()
    assert inside.wait(60)
    forker.start()
    time.sleep(0.2)
    newcomer.start()
    time.sleep(0.2)
    assert seen == []
    let_go.set()
    for thread in (holder, forker, newcomer):
        thread.join(60)
    assert seen[0] == "left" and sorted(seen) == ["came", "forked 0", "left"]
    with gate.work():
        pass


def test_a_child_forked_while_threads_compile_can_compile() -> None:
    toolchain = _nvrtc()

    def build(number: int) -> bytes:
        text = (
            'extern "C" __global__ void k(float* a) { a[0] = sinf(a[1]) * powf(a[2], '
            f"{number}.f); }}\n"
        )
        return toolchain.compile(SourceBundle("k", "k.cu", (("k.cu", text),), ()), "sm_90a")

    build(0)
    with beside(build, threads=3):
        time.sleep(0.2)
        assert [in_child(lambda: build(9)) for _ in range(3)] == [0] * 3


def _nvrtc() -> Toolchain:
    if find_spec("kernelseam_cuda") is None:
        pytest.skip("kernelseam-cuda is not installed")
    from kernelseam_cuda.plugin import backend

    toolchain = backend().toolchain
    assert toolchain is not None
    try:
        toolchain.compiler()
    except CompileError as e:
        pytest.skip(f"nvrtc is missing: {e}")
    return toolchain


LOCKS = {"Barrier", "BoundedSemaphore", "Condition", "Lock", "RLock", "Semaphore"}


def _held_over_forks(source: str) -> list[str]:
    """What a module takes from the standard library that a child could find held for good."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "threading" and node.func.attr in LOCKS:
                results.append(f"threading.{node.func.attr}")
        if isinstance(node, ast.ImportFrom):
            results += [
                f"threading.{a.name}"
                for a in node.names
                if node.module == "threading" and a.name in LOCKS
            ]
            results += [
                "functools.cached_property" for a in node.names if (node.module, a.name) == CACHED
            ]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            results += ["functools.cached_property"] * ((node.value.id, node.attr) == CACHED)
    return results


CACHED = ("functools", "cached_property")
PACKAGES = ("kernelseam", "kernelseam_cuda", "kernelseam_rocm", "kernelseam_rocm_emulator")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_lock_is_one_that_a_child_finds_free(package: str) -> None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(spec.origin).parent
    actual = {
        str(path.relative_to(folder)): names
        for path in folder.rglob("*.py")
        if path.name != "forking.py" and (names := _held_over_forks(path.read_text("utf-8")))
    }
    assert actual == {}


def test_what_could_be_held_is_seen() -> None:
    text = (
        "from functools import cached_property\nimport threading\nx = threading.RLock()\ny: "
        "threading.Lock\n"
    )
    assert sorted(_held_over_forks(text)) == ["functools.cached_property", "threading.RLock"]
    assert _held_over_forks("import functools\n@functools.cached_property\ndef f(self): ...") == [
        "functools.cached_property"
    ]
