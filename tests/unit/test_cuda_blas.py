"""The arguments handed to cuBLAS, computed with as the library would: column-major, with its strides and scalars."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernelseam.blas import Handles
from kernelseam.contract import Device, host_array
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.dtypes import FLOATING, DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import blas  # noqa: E402

DEVICE = Device("cuda", 0, "sm_90a")
SQUARE = GemmProblem(
    GemmSpec(DType.float32, DType.float32, DType.float32), 4, 4, 4, 1, 1, (0, 0, 4), (0, 0, 4), (0, 0, 4)
)
_KINDS = {2: DType.float16, 14: DType.bfloat16, 0: DType.float32, 1: DType.float64}


class Library:
    """cuBLAS on host memory; remembers the stream that was set when a product was asked for."""

    def __init__(self) -> None:
        self.stream: int | None = None
        self.streams: list[int | None] = []
        self.computes: list[int] = []
        self.modes: list[int] = []
        self.status = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        return 0

    def cublasSetMathMode(self, handle: Any, mode: Any) -> int:
        self.modes.append(mode.value)
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        self.stream = stream.value
        return 0

    def cublasGetStatusName(self, status: Any) -> bytes:
        return b"CUBLAS_STATUS_FAKE"

    def cublasGemmStridedBatchedEx(self, handle: Any, *given: Any) -> int:
        (
            turn_a, turn_b, m, n, k, alpha, a, kind_a, lda, stride_a, b, kind_b, ldb, stride_b, beta, c, kind_c, ldc,
            stride_c, count, compute, _,
        ) = (x.value for x in given)
        self.streams.append(self.stream)
        self.computes.append(compute)
        scalar = ctypes.c_double if compute in (70, 71) else ctypes.c_float

        def columns(pointer: int, kind: int, ld: int, stride: int, rows: int, width: int) -> Any:
            return host_array(pointer, (count, rows, width), (stride, 1, ld), _KINDS[kind])

        left = columns(a, kind_a, lda, stride_a, *((k, m) if turn_a else (m, k))).astype(np.float64)
        right = columns(b, kind_b, ldb, stride_b, *((n, k) if turn_b else (k, n))).astype(np.float64)
        out = columns(c, kind_c, ldc, stride_c, m, n)
        product = (left.swapaxes(1, 2) if turn_a else left) @ (right.swapaxes(1, 2) if turn_b else right)
        product = scalar.from_address(alpha).value * product
        scale = scalar.from_address(beta).value
        out[...] = product if scale == 0 else product + scale * out.astype(np.float64)
        return self.status


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setattr(blas, "library", lambda: fake)
    monkeypatch.setattr(blas, "_handles", Handles(blas._create))
    yield fake


def integers(dtype: DType, *shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype.numpy)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_products_agree(library: Library, dtype: DType, a_transposed: bool, b_transposed: bool, beta: float) -> None:
    batch, heads, M, N, K = 2, 3, 5, 7, 6
    a = integers(dtype, batch, heads, *((K, M + 2) if a_transposed else (M, K + 2)))  # rows with gaps
    b = integers(dtype, batch, heads, *((N, K) if b_transposed else (K, N)))
    c = integers(dtype, batch, heads, M, N + 1)
    spec = GemmSpec(dtype, dtype, dtype.accumulator, a_transposed, b_transposed)
    steps = [tuple(s // x.itemsize for s in x.strides[:3]) for x in (a, b, c)]
    problem = GemmProblem(spec, M, N, K, batch, heads, *steps, alpha=0.5, beta=beta)
    left = (a[..., :M].swapaxes(2, 3) if a_transposed else a[..., :K]).astype(np.float64)
    right = (b.swapaxes(2, 3) if b_transposed else b).astype(np.float64)
    want = 0.5 * left @ right + beta * c[..., :N].astype(np.float64)
    edge = c[..., N:].copy()
    (step,) = blas.CublasGemm().build(problem, DEVICE).steps
    step.bind({"A": a.ctypes.data, "B": b.ctypes.data, "C": c.ctypes.data}, 0)(77)
    assert np.array_equal(c[..., :N], want.astype(dtype.numpy))
    assert np.array_equal(c[..., N:], edge)
    assert library.computes == [{DType.float32: 69, DType.float64: 70}.get(dtype, 68)]
    assert library.modes == [16]


def test_every_product_runs_on_the_stream_it_is_given(library: Library) -> None:
    x = np.ones((4, 4), np.float32)
    (step,) = blas.CublasGemm().build(SQUARE, DEVICE).steps
    assert (step.record.kernel, step.record.kind) == ("cublasGemmStridedBatchedEx", "library")
    pointers = dict.fromkeys("ABC", x.ctypes.data)
    first, second = step.bind(pointers, 0), step.bind(pointers, 0)
    for launch, stream in ((first, 7), (second, 2**40), (first, 0)):
        launch(stream)
    assert library.streams == [7, 2**40, None]


def test_a_failure_names_the_call_and_the_status(library: Library) -> None:
    x = np.ones((4, 4), np.float32)
    (step,) = blas.CublasGemm().build(SQUARE, DEVICE).steps
    launch = step.bind(dict.fromkeys("ABC", x.ctypes.data), 0)
    for status, kind in ((13, DeviceError), (3, OutOfDeviceMemory)):
        library.status = status
        with pytest.raises(kind) as caught:
            launch(0)
        assert type(caught.value) is kind
        assert str(caught.value) == f"cublasGemmStridedBatchedEx failed with CUBLAS_STATUS_FAKE ({status})"


def test_without_the_library_the_implementation_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise DeviceError("cuBLAS cannot be loaded (gone): install nvidia-cublas")

    blas.unavailable.cache_clear()
    monkeypatch.setattr(blas, "library", missing)
    try:
        gemm = blas.CublasGemm()
        assert gemm.supports(SQUARE, DEVICE) == "cuBLAS cannot be loaded (gone): install nvidia-cublas"
        assert gemm.supports(replace(SQUARE, M=2**31), DEVICE) == "takes extents and row strides up to 2147483647"
    finally:
        blas.unavailable.cache_clear()
