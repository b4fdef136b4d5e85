"""Calls by the million and plans by the thousand: nothing grows, nothing is mixed up, nothing
outlives its memory."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernelseam
import numpy as np
import pytest
from idle_step import IDLE, IdleImplementation, IdleStep
from kernelseam import BatchedGemmPointers, BatchedGemmStrided, plan
from kernelseam.errors import InvalidValue, OutOfDeviceMemory
from kernelseam.planning import planner
from kernelseam.plugins import plugins
from kernelseam_thirdvendor import AcmeArray

Discovered = Callable[..., Any]
PAGE = 4096


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def growth(call: Callable[[], object], times: int) -> tuple[int, int]:
    """Blocks of Python's allocator, and bytes of memory, that so many calls left behind: the least
    of three rounds after a warm-up. What is kept of each call grows in every round; what the
    interpreter's caches take (some thousand names), plans that are remembered and threads that
    earlier tests left behind, grows in one or another."""
    for _ in range(min(times, 1000)):
        call()
    gc.collect()
    gc.freeze()  # what thousands of tests left: collections look at these calls alone
    rounds = list[tuple[int, int]]()
    for _ in range(3):
        gc.collect()
        blocks, memory = sys.getallocatedblocks(), resident()
        for _ in range(times):
            call()
        gc.collect()
        rounds.append((sys.getallocatedblocks() - blocks, resident() - memory))
    return min(blocks for blocks, _ in rounds), min(memory for _, memory in rounds)


def test_growth_is_seen() -> None:
    kept: list[Any] = []

    # a mapping of its own: a heap may have as much from what earlier tests gave back
    def keep() -> None:
        kept.append(mmap.mmap(-1, 20 * PAGE))
        kept[-1].write(b"\xff" * len(kept[-1]))

    blocks, memory = growth(keep, 250)
    assert blocks > 125 and memory > 10 * 250 * PAGE


NOTHING = IdleImplementation("idle", 0.0, parts=replace(IDLE, workspace_bytes=64))
"""Launches nothing, so that only the call itself is there to grow."""


def small(**more: Any) -> BatchedGemmStrided:
    a = np.ones((2, 2), np.float32)
    return BatchedGemmStrided(A=a, B=a, C=np.empty_like(a), M=2, N=2, K=2, **more)


def test_a_million_calls_leave_nothing(discovered: Discovered) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(NOTHING)
    blocks, memory = growth(plan(small()).bind(), 350_000)
    assert blocks < 100 and memory < 4_000_000, (blocks, memory)


def _matmul2d() -> Callable[[], object]:
    a = np.ones((2, 2), np.float32)
    return lambda: kernelseam.matmul2d(a, a)


def _attention() -> Callable[[], object]:
    a = np.ones((1, 1, 2, 4), np.float32)
    return lambda: kernelseam.attention(a, a, a)


def _pointers() -> Callable[[], object]:
    a, c = np.ones((2, 2, 2), np.float32), np.empty((3, 2, 2), np.float32)
    return lambda: plan(
        BatchedGemmPointers(
            M=2, N=2, K=2, num_heads=2, A_ptrs=list(a), B_ptrs=list(a), C_ptrs=[c[2], c[0]]
        )
    ).bind()()


def _checked() -> Callable[[], object]:
    call = plan(small()).bind(check=True)
    return lambda: call.rebind()()


OPERATIONS: dict[str, Callable[[], Callable[[], object]]] = {
    "call": lambda: plan(small()).bind(),
    "matmul2d": _matmul2d,
    "attention": _attention,
    "pointers": _pointers,
    "checked": _checked,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_calls_that_compute_leave_nothing(operation: str, discovered: Discovered) -> None:
    discovered()
    blocks, memory = growth(OPERATIONS[operation](), 200)
    assert blocks < 100 and memory < 2_000_000, (blocks, memory)


@pytest.mark.slow("minutes: a million computations")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("operation", ["call", "matmul2d", "attention"])
def test_a_million_calls_that_compute_leave_nothing(operation: str, discovered: Discovered) -> None:
    discovered()
    blocks, memory = growth(OPERATIONS[operation](), 350_000)
    assert blocks < 100 and memory < 4_000_000, (blocks, memory)


def test_failed_calls_leave_nothing(discovered: Discovered) -> None:
    discovered()
    a = np.ones((2, 2), np.float32)

    def refused() -> None:
        for wrong in (
            lambda: kernelseam.matmul2d(a, a, out=a),
            lambda: kernelseam.matmul2d(a, np.ones((3, 3), "f4")),
        ):
            with pytest.raises(InvalidValue):
                wrong()

    blocks, memory = growth(refused, 200)
    assert blocks < 100 and memory < 2_000_000, (blocks, memory)


# ---------------------------------------------------------------- many plans at once


def test_eight_threads_make_a_thousand_plans_each(acme: Any, hurried: None) -> None:
    """Half of the problems are each thread's own, half are everybody's; more than are
    remembered."""

    def work(thread: int) -> tuple[int, float]:
        right, worst = 0, 0.0
        rng = np.random.default_rng(thread)
        for i in range(1000):
            N = 1 + thread if i % 2 else 9
            backend = ("numpy", "acme")[i % 3 % 2]
            planned = plan(BatchedGemmStrided(M=1 + i, N=N, K=2, dtype="float32"), backend=backend)
            p: Any = planned.problem
            right += (p.M, p.N, planned.device.backend, planned.choice.implementation.backend) == (
                1 + i,
                N,
                backend,
                backend,
            )
            if i % 20 == 0:
                a, b, c = (
                    rng.random((1 + i, 2), "f4"),
                    rng.random((2, N), "f4"),
                    np.empty((1 + i, N), "f4"),
                )
                planned.bind(A=a.ctypes.data, B=b.ctypes.data, C=c.ctypes.data)()
                worst = max(worst, float(abs(c - a @ b).max()))
        return right, worst

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(8)))
    assert [right for right, _ in answers] == [1000] * 8
    assert max(worst for _, worst in answers) < 1e-6
    assert len(plugins().cache_of(planner.Plans).entries) == planner.MAX_PLANS


# ---------------------------------------------------------------- memory that is gone


def test_a_plan_keeps_its_arrays_and_nothing_else_does(acme: Any) -> None:
    arrays = {n: AcmeArray(np.ones((4, 4), np.float32)) for n in "ABC"}
    there = [weakref.ref(a) for a in arrays.values()]
    planned = plan(BatchedGemmStrided(**arrays, M=4, N=4, K=4))
    arrays.clear()
    gc.collect()
    assert all(ref() is not None for ref in there)  # its plan may still be used …
    planned.bind()()
    result = there[2]()
    assert result is not None and (result.host == 4).all()
    del planned, result
    acme.asked = None  # the vendor notes which array it was last asked about
    gc.collect()
    # … and the plan that is remembered keeps none of them
    assert [ref() for ref in there] == [None] * 3


def test_a_call_keeps_what_it_was_bound_to(acme: Any) -> None:
    planned = plan(BatchedGemmStrided(M=4, N=4, K=4, dtype="float32"), backend="acme")
    arrays = {n: AcmeArray(np.ones((4, 4), np.float32)) for n in "ABC"}
    space = AcmeArray(np.zeros(16, np.float32))
    there = [weakref.ref(a) for a in (*arrays.values(), space)]
    call = planned.bind(**arrays, workspace=space)
    arrays.clear()
    del space
    gc.collect()
    call()
    result = there[2]()
    assert result is not None and (result.host == 4).all()
    del result, call
    acme.asked = None
    gc.collect()
    assert [ref() for ref in there] == [None] * 4
    with pytest.raises(
        InvalidValue, match=r"^A = missing: must be the address of memory on the device\."
    ):
        planned.bind()  # a plan without arrays has none to fall back on


def test_a_call_keeps_its_lists_and_their_matrices(acme: Any) -> None:
    lists = {n: [AcmeArray(np.ones((4, 4), np.float32)) for _ in range(3)][::-1] for n in "ABC"}
    there = [weakref.ref(a) for actual in lists.values() for a in actual]
    call = plan(
        BatchedGemmPointers(
            M=4, N=4, K=4, num_heads=3, **{f"{n}_ptrs": x for n, x in lists.items()}
        )
    ).bind()
    lists.clear()
    gc.collect()
    call()
    assert all((ref().host == 4).all() for ref in there[6:])  # type: ignore[union-attr]
    del call
    acme.asked = None
    gc.collect()
    assert [ref() for ref in there] == [None] * 9


def test_operations_remember_no_array(discovered: Discovered) -> None:
    discovered()
    for _ in range(3):  # the second and third time with the plan of the first
        a = np.ones((3, 4, 4), np.float32)
        out = kernelseam.bmm(a, a)
        assert (out == 4).all()
        there = [weakref.ref(a), weakref.ref(out)]
        del a, out
        gc.collect()
        assert [ref() for ref in there] == [None, None]


class Deleted:
    """An array whose library has given its memory away."""

    gone = False
    array = np.ones((4, 4), np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if self.gone:
            raise RuntimeError("Array has been deleted.")
        return self.array.__dlpack__(**options)


def test_an_array_that_its_library_deleted_is_refused(discovered: Discovered) -> None:
    discovered()
    a, c = Deleted(), np.empty((4, 4), np.float32)
    call = plan(BatchedGemmStrided(A=a, B=a, C=c, M=4, N=4, K=4)).bind()
    call()
    assert (c == 4).all()
    a.gone = True
    with pytest.raises(InvalidValue, match=r"^A = .*Deleted: must be an array of a library"):
        call.rebind(A=a)
    with pytest.raises(InvalidValue, match=r"^a = .*Deleted: must be an array of a library"):
        kernelseam.matmul2d(a, a)


# ---------------------------------------------------------------- too little memory


def test_the_host_out_of_memory_is_reported_and_survived(discovered: Discovered) -> None:
    discovered()
    row = np.ones((1, 2), np.float32)
    # one row a billion times: only the result would take memory
    a = np.broadcast_to(row, (2**30, 2))
    for _ in range(3):
        with pytest.raises(
            OutOfDeviceMemory, match=r"^allocating \[1073741824, 1073741824\] of float32 on numpy:0"
        ):
            kernelseam.matmul2d(a, a, b_transposed=True)
        assert kernelseam.matmul2d(row, row, b_transposed=True) == 2


def test_a_device_out_of_memory_is_reported_and_survived(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the result, at a workspace and at a list of addresses; what works without new memory works
    on."""
    a, c = AcmeArray(np.ones((2, 4, 4), np.float32)), AcmeArray(np.zeros((2, 4, 4), np.float32))
    planned = plan(BatchedGemmStrided(A=a, B=a, C=c, M=4, N=4, K=4, batch=2))
    bound = planned.bind()
    backwards = [AcmeArray(m) for m in reversed(a.host)]
    listed = plan(
        BatchedGemmPointers(
            M=4,
            N=4,
            K=4,
            num_heads=2,
            A_ptrs=backwards,
            B_ptrs=backwards,
            C_ptrs=[AcmeArray(m) for m in reversed(c.host)],
        )
    )

    def full(*args: Any, **more: Any) -> Any:
        raise OutOfDeviceMemory("acme:0 has 12 bytes left")

    with monkeypatch.context() as patch:
        patch.setattr(acme, "empty", full)
        patch.setattr(acme, "from_host", full)
        for work in (lambda: kernelseam.bmm(a, a), planned.bind, listed.bind):
            with pytest.raises(OutOfDeviceMemory, match="^acme:0 has 12 bytes left$") as caught:
                work()
            assert isinstance(caught.value, MemoryError)
        bound()
        assert (c.host == 4).all()
    for work in (lambda: kernelseam.bmm(a, a, out=c), planned.bind(), listed.bind()):
        c.host[...] = 0
        work()
        assert (c.host == 4).all()
    assert acme.current == 0


def test_a_launch_out_of_memory_is_reported_and_survived(
    discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(NOTHING)
    room = [False]

    def launch(stream: int) -> None:
        if not room[0]:
            raise OutOfDeviceMemory("no room for the kernel's stack")

    monkeypatch.setattr(IdleStep, "bind", lambda *_: launch)
    call = plan(small()).bind()
    with kernelseam.trace() as launches, pytest.raises(OutOfDeviceMemory, match="kernel's stack"):
        call()
    assert launches == []  # nothing was launched
    room[0] = True
    with kernelseam.trace() as launches:
        call()
    assert launches == [IdleStep.record]
