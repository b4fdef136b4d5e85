"""One call in several threads, copied, or interrupted; and functions on arrays in several threads,
which share nothing that they write."""

from __future__ import annotations

import copy
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import Attention, BatchedGemmPointers, BatchedGemmStrided, plan
from kernelseam.descriptors import AttentionBwd
from kernelseam.errors import CallInUse, OutOfDeviceMemory
from kernelseam_thirdvendor import AcmeArray
from kernelseam_thirdvendor.gemm import _Step

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(14)
WAYS: tuple[Callable[[Any], object], ...] = (
    copy.deepcopy,
    pickle.dumps,
    lambda x: copy.deepcopy({"inside": [x]}),
)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def gemm(**more: Any) -> BatchedGemmStrided:
    a = AcmeArray(np.ones((4, 4), np.float32))
    return BatchedGemmStrided(
        **{"A": a, "B": a, "C": AcmeArray(np.zeros((4, 4), np.float32)), **more}, M=4, N=4, K=4
    )


# ---------------------------------------------------------------- one call


def test_a_second_thread_is_refused(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def launch(stream: int) -> None:
        inside.set()
        assert go_on.wait(30)

    monkeypatch.setattr(_Step, "bind", lambda *_: launch)
    call = plan(gemm()).bind()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call)
        assert inside.wait(30)
        with kernelseam.trace() as launches, pytest.raises(CallInUse) as caught:
            call()
        assert launches == []
        assert str(caught.value) == (
            f"another thread is running this call ({call.plan.problem} on acme:0 (acme1)), whose "
            "launches share one workspace. Give each thread a call of its own: call.rebind(), "
            "with another workspace where this one was given one."
        )
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        other = call.rebind()
        go_on.set()
        other()
        first.result()
    call()


def test_rebinding_keeps_a_workspace_that_was_given(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(
        _Step,
        "bind",
        lambda step, pointers, workspace: bound.append(workspace) or (lambda stream: 0),
    )
    (one, at_one), (two, at_two) = (
        (x, x.host.ctypes.data)
        for x in (AcmeArray(np.zeros(16, np.complex128).view(np.float32)) for _ in range(2))
    )
    call = plan(gemm()).bind(workspace=one)
    call.rebind()
    call.rebind(workspace=two)
    call.rebind(workspace=two).rebind()
    assert bound == [at_one, at_one, at_two, at_two, at_two]
    first = plan(gemm()).bind()
    second = first.rebind()
    assert bound[-1] != bound[-2]
    del first, second


def test_a_call_that_failed_can_be_made_again(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [False]

    def launch(stream: int) -> None:
        if not room[0]:
            raise OutOfDeviceMemory("no room")

    monkeypatch.setattr(_Step, "bind", lambda *_: launch)
    call = plan(gemm()).bind()
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            call()
    room[0] = True
    call()


@pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="this system has no interval timers to interrupt with"
)
def test_a_call_that_was_interrupted_can_be_made_again(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the interrupt comes: some thousand of them, at whatever line."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(_Step, "bind", lambda *_: lambda stream: None)
    call = plan(gemm()).bind()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + i % 100 * 1e-7)
                while True:
                    call(5)
            except Interrupted:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            call(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _attention() -> tuple[Any, dict[str, Array]]:
    q, k, v = (normal(2, 4, 200, 32) for _ in range(3))
    out = np.empty_like(q)
    return Attention.from_arrays(q, k, v, out, causal=True), {"out": out}


def _gradients() -> tuple[Any, dict[str, Array]]:
    """Those of the bias are added up where they are wanted, by all heads."""
    q, k, v, dout = (normal(2, 2, 64, 16) for _ in range(4))
    bias = normal(1, 1, 64, 64)
    out, lse = kernelseam.attention(q, k, v, bias=bias, return_lse=True)
    forward = Attention.from_arrays(q, k, v, out, lse, bias=bias)
    results = {
        "dq": np.empty_like(q),
        "dk": np.empty_like(k),
        "dv": np.empty_like(v),
        "dbias": np.empty_like(bias),
    }
    return AttentionBwd(forward=forward, dout=dout, **results), results


def _product() -> tuple[Any, dict[str, Array]]:
    a, b = (normal(150, 150).astype(np.float16) for _ in range(2))
    c = np.empty_like(a)
    return BatchedGemmStrided(A=a, B=b, C=c, M=150, N=150, K=150), {"C": c}


@pytest.mark.parametrize("problem", [_attention, _gradients, _product])
def test_eight_threads_of_one_call(problem: Callable[[], Any], hurried: None) -> None:
    """Right numbers, or a refusal; each thread's own ``rebind`` is always right."""
    descriptor, results = problem()
    call = plan(descriptor).bind()
    call()
    expected = {n: x.copy() for n, x in results.items()}
    refusals = []

    def work(barrier: threading.Barrier, own: Any) -> dict[str, Array]:
        mine = {n: np.empty_like(x) for n, x in results.items()}
        bound = own.rebind(**mine)
        barrier.wait(30)
        try:
            own()
        except CallInUse as e:
            refusals.append(e)
        bound()
        return mine

    for _ in range(10):
        for x in results.values():
            x[...] = np.nan
        barrier = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            result = [
                done.result() for done in [pool.submit(work, barrier, call) for _ in range(8)]
            ]
        for actual in (results, *result):
            for n, x in actual.items():
                np.testing.assert_array_equal(x, expected[n])
    assert refusals


# ---------------------------------------------------------------- copies


def test_copies_of_plans_and_calls(acme: Any) -> None:
    planned = plan(gemm())
    call = planned.bind()
    assert copy.copy(planned) is planned and copy.copy(call) is call
    start = " is not deep-copied or pickled: it holds addresses of this process's memory. "
    refusals = {
        planned: (
            f"a plan{start}Plan the descriptor again, which is cheap while its plan is cached."
        ),
        call: f"a call{start}Bind its plan to other memory with call.rebind(…).",
    }
    for x, message in refusals.items():
        for way in WAYS:
            with pytest.raises(TypeError) as caught:
                way(x)
            assert str(caught.value) == message
    call()


def test_copies_of_descriptors() -> None:
    """Over arrays they hold views, and in from_arrays nothing else; over addresses a copy has the
    same ones."""
    a, c = np.ones((3, 4, 4), np.float32), np.zeros((3, 4, 4), np.float32)
    for descriptor in (
        BatchedGemmStrided(A=a, B=a, C=c, M=4, N=4, K=4, batch=3),
        BatchedGemmPointers(
            M=4, N=4, K=4, num_heads=3, A_ptrs=list(a), B_ptrs=list(a), C_ptrs=list(c)
        ),
        Attention.from_arrays(a[None], a[None], a[None], c[None]),
    ):
        assert copy.copy(descriptor).problem() == descriptor.problem()
        for way in WAYS:
            with pytest.raises(
                TypeError, match=r"^a view of an array is not deep-copied or pickled: .*\. Copy"
            ):
                way(descriptor)
    bare = BatchedGemmStrided(A=0, B=0, C=0, M=4, N=4, K=4, batch=3, dtype="float32")
    for way in WAYS:
        way(bare)
    other: Any = copy.deepcopy(bare)
    plan(other, backend="numpy").bind(
        **{n: x.ctypes.data for n, x in zip("ABC", (a, a, c), strict=True)}
    )()
    assert (c == 4).all()


# ---------------------------------------------------------------- functions on arrays


def test_functions_in_threads_have_workspaces_of_their_own(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time, all inside their launch at once, over the same inputs; also where they were
    remembered."""
    inside, together = [], threading.Barrier(4)
    bind = _Step.bind

    def watched(step: Any, pointers: Any, workspace: int) -> Callable[[int], None]:
        launch = bind(step, pointers, workspace)

        def run(stream: int) -> None:
            inside.append(workspace)
            together.wait(30)
            launch(stream)
            together.wait(30)

        return run

    monkeypatch.setattr(_Step, "bind", watched)
    a, b = AcmeArray(normal(4, 4)), AcmeArray(normal(4, 4))
    outs = [AcmeArray(np.empty((4, 4), np.float32)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            inside.clear()
            list(pool.map(lambda out: kernelseam.matmul2d(a, b, out=out), outs))
            assert len(set(inside)) == 4
            for out in outs:
                np.testing.assert_allclose(out.host, a.host @ b.host, rtol=1e-5)


def test_another_stream_is_awaited_before_its_workspace_is_given_back(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that owns it would hand it out again on its own stream, while the other still
    computes in it."""
    alive: list[Any] = []
    waits: list[bool] = []
    empty = acme.empty

    def made(*args: Any, **more: Any) -> Any:
        actual = empty(*args, **more)
        alive.append(actual)
        return actual

    monkeypatch.setattr(acme, "empty", made)
    monkeypatch.setattr(
        acme, "synchronize", lambda device: waits.append(sys.getrefcount(alive[-1]) > 2)
    )
    x, y, out = (AcmeArray(normal(4, 4)) for _ in range(3))
    for stream, awaited in (
        (None, 0),
        (acme.stream, 0),
        (3, 1),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 4)), 1),
    ):
        waits.clear()
        kernelseam.matmul2d(x, y, out=out, stream=stream)
        assert waits == [True] * awaited
        waits.clear()
        kernelseam.matmul2d_bwd(out, x, y, stream=stream)  # one workspace for both launches
        assert waits == [True] * awaited


@pytest.mark.parametrize("keys", [64, 700])
def test_attention_in_threads(keys: int, hurried: None) -> None:
    q, k, v = normal(1, 2, 40, 16), normal(1, 2, keys, 16), normal(1, 2, keys, 16)
    expected, lse = kernelseam.attention(q, k, v, return_lse=True)
    gradients = kernelseam.attention_bwd(q, q, k, v, expected, lse)
    with ThreadPoolExecutor(8) as pool:
        for actual in pool.map(lambda _: kernelseam.attention(q, k, v), range(80)):
            np.testing.assert_array_equal(actual, expected)
        for actual in pool.map(
            lambda _: kernelseam.attention_bwd(q, q, k, v, expected, lse), range(40)
        ):
            for x, w in zip(actual[:3], gradients[:3], strict=True):
                np.testing.assert_array_equal(x, w)
