"""On an NVIDIA GPU: cuBLAS over lists, and cuBLASLt with its workspace, its descriptors and what it
adds."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam.dtypes import DType
from kernelseam.errors import Unsupported
from kernelseam.planning import Call
from nvidia_gpu import DEVICE, RUNTIME, cupy

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)
IMPLEMENTATIONS = ("cublaslt", "cublas-batched")


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return cupy.asarray(RNG.standard_normal(shape).astype(dtype))


def lists(**arrays: Any) -> dict[str, Any]:
    """Addresses of the matrices of [count, rows, columns], in device memory."""
    return {
        f"{n}_ptrs": cupy.asarray([m.data.ptr for m in x], np.uint64) for n, x in arrays.items()
    }


def bound(implementation: str, a: Any, b: Any, c: Any, **more: Any) -> Call:
    """A product of [count, M, K] and [count, K, N]."""
    shape = {"M": a.shape[1], "N": b.shape[2], "K": a.shape[2], "batch": a.shape[0]}
    if implementation != "cublas-batched":
        return ks.plan(
            ks.BatchedGemmStrided(A=a, B=b, C=c, **shape, **more), implementation=implementation
        ).bind(check=True)
    dtype = str(a.dtype)
    gemm = ks.BatchedGemmPointers(
        **lists(A=a, B=b, C=c), **shape, **more, dtype=dtype, alignment=16
    )
    return ks.plan(gemm, device=DEVICE, implementation=implementation).bind(check=True)


def unchecked(call: Call) -> Call:
    """The same, which does nothing but launch."""
    return call.plan.bind()


@pytest.mark.parametrize("implementation", ["cublas", *IMPLEMENTATIONS])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(64, 64, 64), (8, 24, 16), (512, 512, 64), (1, 16, 4096)]
)
def test_products_pass_their_check(implementation: str, dtype: str, M: int, N: int, K: int) -> None:
    a, b, c = (
        normal(6, M, K, dtype=dtype),
        normal(6, K, N, dtype=dtype),
        cupy.full((6, M, N), np.nan, dtype),
    )
    call = bound(implementation, a, b, c, alpha=0.5)
    with ks.trace() as launches:
        call()
    assert [r.kind for r in launches] == ["library"]
    bound(implementation, a, b, c, alpha=-1.0, beta=0.5)()


def test_the_library_adds_a_bias_and_a_residual() -> None:
    a, b, c = normal(6, 40, 24), normal(6, 24, 48), cupy.full((6, 40, 48), np.nan, "f4")
    bias, residual = normal(48), normal(6, 40, 48)
    added = {"bias": bias.data.ptr, "stride_bias_batch": 0, "stride_bias_head": 0}
    call = bound("cublaslt", a, b, c, **added, residual=residual)
    call()
    assert np.allclose(c.get(), (a @ b + bias + residual).get(), atol=1e-3)
    a, b, c, bias, residual = (x.astype("f2") for x in (a, b, c, bias, residual))
    added["bias"] = bias.data.ptr
    bound("cublaslt", a, b, c, **added)()
    bound("cublaslt", a, b, c, residual=residual)()
    with pytest.raises(
        Unsupported, match="rounds to float16 between adding a bias and adding a residual"
    ):
        bound("cublaslt", a, b, c, **added, residual=residual)


def chosen(descriptor: Any) -> str:
    return ks.plan(descriptor, device=DEVICE).implementation


def test_what_dispatch_chooses() -> None:
    shape = {
        "M": 512,
        "N": 512,
        "K": 512,
        "batch": 2,
        "num_heads": 8,
        "b_transposed": True,
        "dtype": "float16",
    }
    place = {"A": 1 << 40, "B": 1 << 41, "C": 1 << 42}
    hopper = DEVICE.arch == "sm_90a"
    assert chosen(ks.BatchedGemmStrided(**shape, **place)) == ("sm90" if hopper else "cublas")
    assert chosen(
        ks.BatchedGemmStrided(
            **shape, **place, bias=1 << 43, stride_bias_batch=0, stride_bias_head=0
        )
    ) == ("sm90" if hopper else "cublaslt")
    tokens = {"stride_a_batch": 512 * 4096, "stride_a_head": 512, "stride_a_row": 4096}
    assert chosen(ks.BatchedGemmStrided(**shape, **place, **tokens)) == (
        "sm90" if hopper else "shared"
    )
    assert chosen(ks.BatchedGemmPointers(**shape, alignment=16)) == (
        "sm90" if hopper else "cublas-batched"
    )
    assert chosen(ks.BatchedGemmPointers(**shape)) == "shared"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_call_is_captured_in_a_graph(implementation: str) -> None:
    torch = pytest.importorskip("torch")
    a, c = normal(4, 64, 64), cupy.zeros((4, 64, 64), np.float32)
    call = unchecked(bound(implementation, a, a, c))
    call()  # the library's own kernels are its own to load
    RUNTIME.synchronize(DEVICE)
    c.fill(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not c.any()
    graph.replay()
    torch.cuda.synchronize()
    assert cupy.allclose(c, a @ a, atol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_call_waits_for_what_its_stream_has_queued(implementation: str) -> None:
    torch = pytest.importorskip("torch")
    a, c = cupy.zeros((2, 64, 64), np.float32), cupy.zeros((2, 64, 64), np.float32)
    call = unchecked(bound(implementation, a, a, c))
    call()
    RUNTIME.synchronize(DEVICE)
    stream = torch.cuda.Stream()
    filled = torch.as_tensor(a, device="cuda")  # the same memory
    with torch.cuda.stream(stream):
        # about 0.1 s: on another stream the product would run before `a` is filled
        torch.cuda._sleep(200_000_000)
        filled.fill_(1)
        call(stream.cuda_stream)
    stream.synchronize()
    assert (c == 64).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_threads_share_a_plan(implementation: str) -> None:
    a = normal(8, 96, 96)
    results = [cupy.zeros((8, 96, 96), np.float32) for _ in range(6)]
    calls = [unchecked(bound(implementation, a, a, c)) for c in results]
    wrong: list[BaseException] = []

    def work(call: Callable[..., None]) -> None:
        try:
            with cupy.cuda.Device(DEVICE.index), cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(200):
                    call(stream.ptr)
                stream.synchronize()
        except BaseException as e:
            wrong.append(e)

    RUNTIME.synchronize(DEVICE)
    team = [threading.Thread(target=work, args=(call,)) for call in calls]
    for t in team:
        t.start()
    for t in team:
        t.join()
    assert wrong == []
    assert all(cupy.allclose(c, a @ a, atol=1e-3) for c in results)


def test_any_workspace_of_the_callers_will_do() -> None:
    """A long sum is one that the library splits, with its parts in the workspace."""
    a, b, c = (
        normal(1, 64, 1 << 17, dtype="f2"),
        normal(1, 1 << 17, 64, dtype="f2"),
        cupy.zeros((1, 64, 64), "f4"),
    )
    planned = ks.plan(
        ks.BatchedGemmStrided(A=a, B=b, C=c, M=64, N=64, K=1 << 17), implementation="cublaslt"
    )
    if not planned.workspace_bytes:
        pytest.skip("the library's algorithm needs no workspace here")
    memory = cupy.full((planned.workspace_bytes + 512,), 0xA5, np.uint8)
    for start in (0, 16, 240, 256):
        memory.fill(0xA5)
        c.fill(np.nan)
        planned.bind(workspace=memory.data.ptr + start, check=True)()
        assert (memory[:start] == 0xA5).all() and (
            memory[start + planned.workspace_bytes :] == 0xA5
        ).all()


def test_descriptors_and_calls_by_the_thousand_leave_nothing() -> None:
    a, c, bias = normal(1, 16, 16), cupy.zeros((1, 16, 16), np.float32), normal(16)
    given = ks.BatchedGemmStrided(
        A=a, B=a, C=c, bias=bias.data.ptr, stride_bias_batch=0, stride_bias_head=0, M=16, N=16, K=16
    )
    planned = ks.plan(given, implementation="cublaslt")
    stream = cupy.cuda.get_current_stream().ptr

    def repeat(times: int) -> None:
        for _ in range(times):
            planned.bind()(stream)
        cupy.cuda.get_current_stream().synchronize()

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    repeat(1000)
    gc.collect()
    blocks, bytes_before = sys.getallocatedblocks(), resident()
    repeat(20_000)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 200
    assert resident() - bytes_before < 2 << 20  # a descriptor kept of each would be 5 MB
    assert cupy.allclose(c, a @ a + bias, atol=1e-3)


def test_a_list_that_is_wider_is_summed_no_less_precisely() -> None:
    a, b = normal(3, 32, 256, dtype="f2"), normal(3, 256, 40, dtype="f2")
    c = cupy.zeros((3, 32, 40), np.float32)
    gemm = ks.BatchedGemmPointers(
        **lists(A=a, B=b, C=c),
        M=32,
        N=40,
        K=256,
        batch=3,
        dtype=DType.float16,
        dtype_c=DType.float32,
        alignment=16,
    )
    ks.plan(gemm, device=DEVICE, implementation="cublas-batched").bind(check=True)()
