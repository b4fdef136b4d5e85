"""On an NVIDIA GPU: memory, streams, launches, array kinds, the vendor's BLAS, and what goes
wrong."""

from __future__ import annotations

import threading
import time
import timeit
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from attention_formula import attention
from kernelseam.contract import LaunchConfig, SourceBundle
from kernelseam.dtypes import E4M3, DType
from kernelseam.errors import OutOfDeviceMemory
from nvidia_gpu import DEVICE, RUNTIME, TOOLCHAIN, cupy

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [d for d in DType if d not in E4M3], ids=str)
def test_a_round_trip_keeps_every_bit(dtype: DType) -> None:
    host = normal(3, 5, 7).astype(dtype.numpy)
    there = RUNTIME.from_host(host, DEVICE)
    info = RUNTIME.describe(there)
    assert (info.shape, info.strides, info.dtype, info.device) == (
        (3, 5, 7),
        (35, 7, 1),
        dtype,
        DEVICE,
    )
    assert np.array_equal(RUNTIME.to_host(there).view(np.uint8), host.view(np.uint8))


def test_limits_are_of_a_real_device() -> None:
    limits = DEVICE.limits
    assert limits.compute_units > 10
    assert limits.memory_bytes > 2**30
    assert 1e11 < limits.bytes_per_second < 2e13
    assert limits.operations_per_second["float16"] > 1e13
    assert "\0" not in DEVICE.name


def saxpy() -> Callable[..., Callable[[int], None]]:
    text = (
        'extern "C" __global__ void k(float* y, const float* x, float a, int n) '
        "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] += a * x[i]; }"
    )
    binary = TOOLCHAIN.compile(SourceBundle("k", "k.cu", (("k.cu", text),), ()), DEVICE.arch)
    kernel = TOOLCHAIN.load(binary, "k", DEVICE)
    from kernelseam.kernels.signature import Signature

    signature = Signature((("y", "pointer"), ("x", "pointer"), ("a", "f32"), ("n", "i32")))
    signature.placed(kernel.facts)

    def prepare(y: Any, x: Any, a: float, n: int) -> Callable[[int], None]:
        arguments = signature.pack({"y": y.data.ptr, "x": x.data.ptr, "a": a, "n": n})
        launch: Callable[[int], None] = kernel.prepare(
            LaunchConfig((-(-n // 256), 1, 1), (256, 1, 1)), arguments
        )
        return launch

    return prepare


def test_launches_on_streams_of_every_kind() -> None:
    prepare, n = saxpy(), 1000
    x, y = cupy.asarray(normal(n)), cupy.zeros(n, np.float32)
    launch = prepare(y, x, 2.0, n)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    launch(0)
    cupy.cuda.get_current_stream().synchronize()
    launch(stream.ptr)
    stream.synchronize()
    assert cupy.array_equal(y, 4 * x)


def test_a_thread_without_a_context_gets_one() -> None:
    a, b, errors = cupy.asarray(normal(2, 32, 32)), cupy.asarray(normal(2, 32, 32)), []
    c = cupy.empty_like(a)
    call = ks.plan(ks.BatchedGemmStrided(A=a, B=b, C=c, M=32, N=32, K=32, batch=2)).bind()
    stream = cupy.cuda.get_current_stream().ptr

    def work() -> None:
        try:
            call(stream)
        except Exception as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert np.allclose(c.get(), a.get() @ b.get(), atol=1e-4)


def test_eight_threads_plan_and_run_at_once() -> None:
    expected, actual, errors = {}, {}, []

    def work(i: int) -> None:
        try:
            rng = np.random.default_rng(i)
            a, b = (rng.standard_normal((3, 16 + i, 16 + i)).astype(np.float32) for _ in range(2))
            expected[i] = a @ b
            with cupy.cuda.Stream(non_blocking=True):
                actual[i] = ks.bmm(cupy.asarray(a), cupy.asarray(b)).get()
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert all(np.allclose(actual[i], expected[i], atol=1e-4) for i in range(8))


def test_the_device_is_restored() -> None:
    before = cupy.cuda.runtime.getDevice()
    with RUNTIME.activate(DEVICE):
        assert cupy.cuda.runtime.getDevice() == DEVICE.index
    assert cupy.cuda.runtime.getDevice() == before


def test_out_of_memory_is_reported_and_survived() -> None:
    for dtype in (DType.float32, DType.bfloat16):
        with pytest.raises(OutOfDeviceMemory):
            RUNTIME.empty((2**42,), dtype, DEVICE)
    small = RUNTIME.empty((16,), DType.float32, DEVICE)
    assert RUNTIME.describe(small).shape == (16,)


def test_results_are_of_the_callers_kind() -> None:
    q = cupy.asarray(normal(1, 2, 16, 32, dtype=np.float16))
    out = ks.attention(q, q, q, causal=True)
    assert isinstance(out, cupy.ndarray)
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        t = torch.randn(1, 2, 16, 32, device="cuda").to(dtype)
        result, lse = ks.attention(t, t, t, return_lse=True)
        assert (
            isinstance(result, torch.Tensor) and result.dtype == dtype and result.device == t.device
        )
        expected, of = attention(t, t, t)
        assert torch.allclose(result.double(), expected, atol=2e-2)
        assert torch.allclose(lse.double(), of, atol=1e-3)


def test_torchs_current_stream_is_used() -> None:
    torch = pytest.importorskip("torch")
    a = torch.randn(2, 64, 64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        info = RUNTIME.describe(a)
        assert RUNTIME.current_stream(DEVICE, info) == stream.cuda_stream
        out = ks.bmm(a, a)
    stream.synchronize()
    assert torch.allclose(out, a @ a, atol=1e-3)


@pytest.mark.parametrize("implementation", ["shared", "cublas"])
def test_the_first_launch_of_a_binary_is_captured_in_a_graph(implementation: str) -> None:
    torch = pytest.importorskip("torch")
    a = torch.randn(4, 88, 88, device="cuda", dtype=torch.float64)
    c = torch.zeros_like(a)
    descriptor = ks.BatchedGemmStrided(
        A=a, B=a, C=c, M=88, N=88, K=88, batch=4, a_transposed=True, b_transposed=True
    )
    call = ks.plan(descriptor, implementation=implementation).bind()
    if implementation == "cublas":
        call()  # the library's own kernels are its own to load
    torch.cuda.synchronize()
    c.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    assert not c.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(c, a.mT @ a.mT)


@pytest.mark.parametrize("implementation", ["shared", "cublas"])
def test_a_call_waits_for_what_its_stream_has_queued(implementation: str) -> None:
    torch = pytest.importorskip("torch")
    a, c = torch.zeros(2, 64, 64, device="cuda"), torch.zeros(2, 64, 64, device="cuda")
    descriptor = ks.BatchedGemmStrided(A=a, B=a, C=c, M=64, N=64, K=64, batch=2)
    call = ks.plan(descriptor, implementation=implementation).bind()
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # about 0.1 s: on another stream the product would run before `a` is filled
        torch.cuda._sleep(200_000_000)
        a.fill_(1)
        call()
    stream.synchronize()
    assert (c == 64).all()


def test_cupys_bfloat16_stays_cupys() -> None:
    a = RUNTIME.from_host(normal(1, 16, 16).astype(DType.bfloat16.numpy), DEVICE)
    assert isinstance(a, cupy.ndarray)
    assert isinstance(ks.bmm(a, a), cupy.ndarray)


def test_one_launch_whatever_the_batch() -> None:
    for batch in (1, 257, 70_000):
        a, c = cupy.zeros((batch, 4, 4), np.float32), cupy.empty((batch, 4, 4), np.float32)
        call = ks.plan(
            ks.BatchedGemmStrided(A=a, B=a, C=c, M=4, N=4, K=4, batch=batch),
            implementation="shared",
        ).bind()
        with ks.trace() as launches:
            call()
        assert [r.kernel for r in launches] == ["gemm"]
    q = cupy.zeros((16, 16, 4096, 64), np.float16)
    with ks.trace() as launches:
        ks.attention(q, q, q, causal=True)
    record, *others = [r for r in launches if r.kind != "memset"]  # one may set a counter
    assert record.kernel.startswith("attention_forward") and not others
    assert (record.arch, record.kind) == (DEVICE.arch, "kernel")
    assert record.grid[0] >= 64 and record.block[0] >= 64 and record.shared_bytes > 0


def test_a_launch_costs_the_host_little() -> None:
    x = cupy.zeros(16, np.float32)
    launch, stream = saxpy()(x, x, 0.0, 16), cupy.cuda.Stream(non_blocking=True)
    launch(stream.ptr)
    each = []
    for _ in range(20):
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            launch(stream.ptr)
        each.append((time.perf_counter() - start) / 100)
    stream.synchronize()
    with_device = (
        min(timeit.repeat(lambda: RUNTIME.activate(DEVICE).__enter__(), number=1000, repeat=3))
        / 1000
    )
    print(
        f"\nhost time of a launch {min(each) * 1e6:.2f} µs, of making the device current "
        f"{with_device * 1e6:.2f} µs"
    )
    assert min(each) < 10e-6
    assert with_device < 5e-6


def test_a_call_costs_the_host_little() -> None:
    a = cupy.zeros((1, 16, 16), np.float32)
    call = ks.plan(ks.BatchedGemmStrided(A=a, B=a, C=cupy.empty_like(a), M=16, N=16, K=16)).bind()
    stream = cupy.cuda.get_current_stream().ptr
    call(stream)
    start = time.perf_counter()
    for _ in range(1000):
        call(stream)
    each = (time.perf_counter() - start) / 1000
    cupy.cuda.get_current_stream().synchronize()
    assert each < 50e-6, f"{each * 1e6:.1f} µs"
