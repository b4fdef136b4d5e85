"""On an NVIDIA GPU, faults on purpose: no memory left, wrong numbers, calls by the million, plans
by the thousand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.dtypes import FLOATING, DType
from kernelseam.errors import OutOfDeviceMemory, WrongResult
from kernelseam.planning.binding import in_order
from nvidia_gpu import ALONE, DEVICE, RUNTIME, cupy

pytestmark = [pytest.mark.gpu, ALONE]
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return cupy.asarray(RNG.standard_normal(shape).astype(dtype))


def free() -> int:
    """Bytes of device memory that nobody holds, what cupy's pool keeps given back first."""
    gc.collect()
    RUNTIME.synchronize(DEVICE)
    cupy.get_default_memory_pool().free_all_blocks()
    return int(cupy.cuda.runtime.memGetInfo()[0])


@contextmanager
def no_memory_left() -> Iterator[None]:
    """All but crumbs of the device's memory is taken."""
    free()
    held, size = [], 1 << 30
    while size >= 1 << 20:
        try:
            held.append(RUNTIME.empty((size // 4,), DType.float32, DEVICE))
        except OutOfDeviceMemory:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        free()


# ---------------------------------------------------------------- out of memory


def test_a_result_that_fits_nowhere() -> None:
    row = normal(1, 2)
    # one row many times: only the result would take memory, a pebibyte of it
    a = cupy.broadcast_to(row, (1 << 24, 2))
    expected = (row @ row.T).get()
    ks.matmul2d(row, row, b_transposed=True)  # the libraries' handles and workspaces stay
    before = free()
    for _ in range(10):
        with pytest.raises(
            OutOfDeviceMemory, match=r"^allocating \[16777216, 16777216\] of float32 on cuda:0"
        ):
            ks.matmul2d(a, a, b_transposed=True)
        assert np.allclose(ks.matmul2d(row, row, b_transposed=True).get(), expected, rtol=1e-5)
    assert abs(free() - before) < 1 << 24


def test_a_result_of_torchs_that_fits_nowhere() -> None:
    torch = pytest.importorskip("torch")
    row = torch.ones(1, 2, device="cuda")
    a = row.expand(1 << 24, 2)
    for _ in range(3):
        with pytest.raises(
            OutOfDeviceMemory, match=r"^allocating \[16777216, 16777216\] of float32 on cuda:0"
        ):
            ks.matmul2d(a, a, b_transposed=True)
        assert ks.matmul2d(row, row, b_transposed=True).item() == 2


def test_a_full_device_is_reported_and_recovered_from() -> None:
    """Results and lists of addresses are refused; calls that need no new memory go on; then
    everything works."""
    a = normal(4, 512, 512)
    c = cupy.zeros_like(a)
    expected = (a @ a).get()
    bound = ks.plan(
        ks.BatchedGemmStrided(A=a, B=a, C=c, M=512, N=512, K=512, batch=4), implementation="shared"
    ).bind()
    bound()
    big = cupy.broadcast_to(a[:1], (64, 512, 512))  # of which the result takes 64 MiB
    with no_memory_left():
        for _ in range(3):
            with pytest.raises(
                OutOfDeviceMemory, match=r"^allocating \[64, 512, 512\] of float32 on cuda:0"
            ):
                ks.bmm(big, big, implementation="shared")
            c.data.memset(0, c.nbytes)
            bound()
            # cupy itself has no memory to compare in
            assert np.allclose(c.get(), expected, atol=1e-3)
    assert np.allclose(ks.bmm(big, big, implementation="shared")[63].get(), expected[0], atol=1e-3)


def test_a_full_device_and_the_vendors_blas() -> None:
    a = normal(64, 512, 512)
    ks.bmm(a, a, implementation="cublas")
    with no_memory_left(), pytest.raises(OutOfDeviceMemory):
        ks.bmm(a, a, implementation="cublas")
    assert cupy.allclose(ks.bmm(a, a, implementation="cublas"), a @ a, atol=1e-3)


# ---------------------------------------------------------------- wrong numbers


@pytest.mark.parametrize("implementation", ["shared", "cublas"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_right_products_pass_their_check(implementation: str, dtype: DType) -> None:
    x = {
        n: RUNTIME.from_host(RNG.standard_normal((3, 40, 40)).astype(dtype.numpy), DEVICE)
        for n in "ABC"
    }
    gemm = ks.BatchedGemmStrided(**x, M=40, N=40, K=40, batch=3, alpha=0.5, beta=2.0)
    call = ks.plan(gemm, implementation=implementation).bind(check=True)
    call()
    call()


def test_right_products_of_lists_pass_their_check() -> None:
    x = {f"{n}_ptrs": list(normal(3, 40, 40))[::-1] for n in "ABC"}
    ks.plan(ks.BatchedGemmPointers(**x, M=40, N=40, K=40, num_heads=3)).bind(check=True)()
    addresses = {
        n: cupy.asarray([m.data.ptr for m in actual], np.uint64) for n, actual in x.items()
    }
    given = ks.BatchedGemmPointers(**addresses, M=40, N=40, K=40, num_heads=3, dtype="float32")
    ks.plan(given, device=DEVICE).bind(check=True)()


def test_right_attentions_pass_their_check() -> None:
    q, k, v = (
        normal(2, 65, 4, 64, dtype="f2"),
        normal(2, 129, 2, 64, dtype="f2"),
        normal(2, 129, 2, 64, dtype="f2"),
    )
    out, lse = cupy.empty_like(q), cupy.empty((2, 4, 65), np.float32)
    ks.plan(ks.Attention.from_arrays(q, k, v, out, lse, causal=True, layout="bshd")).bind(
        check=True
    )()


def test_one_number_that_is_off_is_found() -> None:
    torch = pytest.importorskip("torch")
    x = {n: normal(3, 40, 40) for n in "ABC"}
    result = torch.as_tensor(x["C"], device="cuda")  # the same memory
    call = ks.plan(
        ks.BatchedGemmStrided(**x, M=40, N=40, K=40, batch=3), implementation="shared"
    ).bind(check=True)

    def off(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            result[2, 39, 39] += 1

    call._run = in_order((call._run, off))
    with pytest.raises(WrongResult, match=r"^shared on cuda:0 .* wrongly: C\[2, 0, 39, 39\] is "):
        call()


# ---------------------------------------------------------------- many


@pytest.mark.parametrize("implementation", ["shared", "cublas"])
def test_a_million_calls_leave_nothing(implementation: str) -> None:
    a = normal(1, 16, 16)
    given = ks.BatchedGemmStrided(A=a, B=a, C=cupy.empty_like(a), M=16, N=16, K=16)
    call, stream = (
        ks.plan(given, implementation=implementation).bind(),
        cupy.cuda.get_current_stream().ptr,
    )

    def repeat(times: int) -> None:
        for i in range(times):
            call(stream)
            if i % 10_000 == 0:
                cupy.cuda.get_current_stream().synchronize()

    repeat(10_000)
    memory, blocks = free(), sys.getallocatedblocks()
    repeat(1_000_000)
    assert free() == memory
    assert sys.getallocatedblocks() - blocks < 200


def test_operations_leave_nothing() -> None:
    a = normal(2, 16, 16)
    work: Callable[[], object] = lambda: ks.bmm(a, a)  # noqa: E731
    for _ in range(2000):
        work()
    memory, blocks = free(), sys.getallocatedblocks()
    for _ in range(20_000):
        work()
    assert free() == memory
    assert sys.getallocatedblocks() - blocks < 500


def test_eight_threads_make_a_thousand_plans_each() -> None:
    ks.bmm(normal(2, 8, 8), normal(2, 8, 8))  # the binary is there
    ks.matmul2d(normal(8, 4), normal(4, 8))

    def work(thread: int) -> float:
        rng, worst = np.random.default_rng(thread), 0.0
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for i in range(1000):
                N = 4 + 4 * thread if i % 2 else 64
                planned = ks.plan(
                    ks.BatchedGemmStrided(M=1 + i, N=N, K=4, dtype="float32"),
                    device=DEVICE,
                    implementation="shared",
                )
                if i % 20 == 0:
                    a, b = rng.random((1 + i, 4), "f4"), rng.random((4, N), "f4")
                    x = {
                        "A": cupy.asarray(a),
                        "B": cupy.asarray(b),
                        "C": cupy.empty((1 + i, N), "f4"),
                    }
                    planned.bind(**x)(stream.ptr)
                    worst = max(worst, float(abs(x["C"].get() - a @ b).max()))
        return worst

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) < 1e-5
