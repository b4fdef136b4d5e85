"""The arguments handed to hipBLAS, computed with as the library would: column-major, with its
strides and scalars.

hip-python's modules are stood in for by ones over host memory: neither the library nor a device is
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from column_blas import (
    PRODUCTS,
    SQUARE,
    Product,
    check_lists_that_are_not_read,
    check_products,
    check_products_of_lists,
    integers,
    multiply_as_told,
)
from kernelseam.blas import Handles
from kernelseam.contract import EMULATED, Device
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, NoDevice, OutOfDeviceMemory

pytest.importorskip("kernelseam_rocm", reason="kernelseam-rocm is not installed")
from kernelseam_rocm import bindings, blas  # noqa: E402

DEVICE = Device("rocm", 0, "gfx942")


class hipDataType(IntEnum):
    HIP_R_32F, HIP_R_64F, HIP_R_16F, HIP_R_16BF = 0, 1, 2, 14


class hipblasOperation_t(IntEnum):
    HIPBLAS_OP_N, HIPBLAS_OP_T = 111, 112


class hipblasComputeType_t(IntEnum):
    HIPBLAS_COMPUTE_32F, HIPBLAS_COMPUTE_64F = 2, 7


class hipblasGemmAlgo_t(IntEnum):
    HIPBLAS_GEMM_DEFAULT = 160


class hipblasStatus_t(IntEnum):
    HIPBLAS_STATUS_SUCCESS = 0
    HIPBLAS_STATUS_NOT_INITIALIZED = 1
    HIPBLAS_STATUS_ALLOC_FAILED = 2
    HIPBLAS_STATUS_INVALID_VALUE = 3


OK = hipblasStatus_t.HIPBLAS_STATUS_SUCCESS
_KINDS = {
    hipDataType.HIP_R_16F: DType.float16,
    hipDataType.HIP_R_16BF: DType.bfloat16,
    hipDataType.HIP_R_32F: DType.float32,
    hipDataType.HIP_R_64F: DType.float64,
}
_TURNED = {hipblasOperation_t.HIPBLAS_OP_N: False, hipblasOperation_t.HIPBLAS_OP_T: True}


class Library:
    """hip-python's hipblas on host memory; remembers the stream that was set when a product was
    asked for."""

    hipblasOperation_t, hipblasComputeType_t = hipblasOperation_t, hipblasComputeType_t
    hipblasGemmAlgo_t = hipblasGemmAlgo_t

    def __init__(self) -> None:
        self.stream: int | None = None
        self.streams: list[int | None] = []
        self.computes: list[int] = []
        self.made = self.destroyed = 0
        self.create = self.set = self.status = OK

    def hipblasCreate(self) -> tuple[Any, Any]:
        self.made += 1
        return self.create, object()

    def hipblasDestroy(self, handle: Any) -> tuple[Any]:
        self.destroyed += 1
        return (OK,)

    def hipblasSetStream(self, handle: Any, stream: int) -> tuple[Any]:
        self.stream = stream
        return (self.set,)

    def hipblasGemmStridedBatchedEx(self, handle: Any, *given: Any) -> tuple[Any]:
        return self._multiply("strided", given)

    def hipblasGemmBatchedEx(self, handle: Any, *given: Any) -> tuple[Any]:
        return self._multiply("lists", given)

    def _multiply(self, batch: str, given: Any) -> tuple[Any]:
        wide = hipblasComputeType_t.HIPBLAS_COMPUTE_64F
        told = multiply_as_told(given, batch, _KINDS, _TURNED.__getitem__, wide.__eq__)
        assert told["algorithm"] == 160
        self.streams.append(self.stream)
        self.computes.append(told["compute"])
        return (self.status,)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setattr(bindings, "module", lambda name: {"hipblas": fake}[name])
    monkeypatch.setattr(bindings, "hip", lambda: SimpleNamespace(hipDataType=hipDataType))
    monkeypatch.setattr(bindings, "call", lambda name: {"hipRuntimeGetVersion": 70_000_000}[name])
    monkeypatch.setattr(blas, "_handles", Handles(blas._create))
    blas._unavailable.cache_clear()
    yield fake
    blas._unavailable.cache_clear()


def launched(problem: GemmProblem = SQUARE) -> Any:
    x = np.ones((4, 4), np.float32)
    (step,) = blas.HipBlasGemm().build(problem, DEVICE).steps
    launch = step.bind(dict.fromkeys("ABC", x.ctypes.data), 0)
    return lambda stream, keep=x: launch(stream)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_agree(library: Library, product: Product) -> None:
    check_products(blas.HipBlasGemm(), DEVICE, product)
    assert library.computes == [7 if product.dtype is DType.float64 else 2]


def test_alpha_0_reads_nothing(library: Library) -> None:
    c = integers(DType.float32, 4, 4)
    expected = 3 * c
    (step,) = blas.HipBlasGemm().build(replace(SQUARE, alpha=0.0, beta=3.0), DEVICE).steps
    step.bind({"C": c.ctypes.data}, 0)(0)
    assert np.array_equal(c, expected)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products_of_lists_agree(library: Library, product: Product) -> None:
    check_products_of_lists(blas.HipBlasBatchedGemm(), DEVICE, "hipblasGemmBatchedEx", product)
    assert library.streams == [77]


def test_lists_that_are_not_read_need_not_be_there(library: Library) -> None:
    check_lists_that_are_not_read(blas.HipBlasBatchedGemm(), DEVICE)


def test_every_product_runs_on_the_stream_it_is_given(library: Library) -> None:
    (step,) = blas.HipBlasGemm().build(SQUARE, DEVICE).steps
    assert (step.record.kernel, step.record.kind) == ("hipblasGemmStridedBatchedEx", "library")
    first, second = launched(), launched()
    for launch, stream in ((first, 7), (second, 2**40), (first, 0)):
        launch(stream)
    assert library.streams == [7, 2**40, 0]
    assert library.made == 1  # one handle for all of a device's products


STATUSES = [
    (hipblasStatus_t.HIPBLAS_STATUS_NOT_INITIALIZED, NoDevice),
    (hipblasStatus_t.HIPBLAS_STATUS_ALLOC_FAILED, OutOfDeviceMemory),
    (hipblasStatus_t.HIPBLAS_STATUS_INVALID_VALUE, DeviceError),
]


@pytest.mark.parametrize(("status", "kind"), STATUSES)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("create", "hipblasCreate"),
        ("set", "hipblasSetStream"),
        ("status", "hipblasGemmStridedBatchedEx"),
    ],
)
def test_a_failure_names_the_call_and_the_status(
    library: Library, call: str, name: str, status: hipblasStatus_t, kind: type[DeviceError]
) -> None:
    setattr(library, call, status)
    with pytest.raises(DeviceError) as caught:
        launched()(0)
    assert type(caught.value) is kind
    assert isinstance(caught.value, MemoryError) == (kind is OutOfDeviceMemory)
    assert str(caught.value) == f"{name} failed with {status.name} ({int(status)})"
    setattr(library, call, OK)
    launched()(5)  # and it is recovered from: nothing of the failure was kept
    assert library.streams[-1] == 5


def test_what_it_refuses(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = blas.HipBlasGemm()
    assert gemm.supports(SQUARE, DEVICE) is None and (library.made, library.destroyed) == (1, 1)
    assert (
        gemm.supports(replace(SQUARE, M=2**31), DEVICE)
        == "takes extents and row strides up to 2147483647"
    )
    assert gemm.supports(SQUARE, replace(DEVICE, evidence=EMULATED)) == "runs on real devices only"
    blas._unavailable.cache_clear()
    monkeypatch.setattr(bindings, "call", lambda name: 60_443_483)
    assert gemm.supports(SQUARE, DEVICE) == "needs ROCm 7 or newer; the runtime here is of ROCm 6"
    blas._unavailable.cache_clear()
    monkeypatch.setattr(bindings, "call", lambda name: 70_000_000)
    library.create = hipblasStatus_t.HIPBLAS_STATUS_NOT_INITIALIZED
    assert gemm.supports(SQUARE, DEVICE) == (
        "hipBLAS cannot be used: hipblasCreate failed with HIPBLAS_STATUS_NOT_INITIALIZED (1)"
    )


def test_what_it_takes_of_lists(library: Library) -> None:
    gemm, strided = blas.HipBlasBatchedGemm(), blas.HipBlasGemm()
    listed = replace(SQUARE, spec=replace(SQUARE.spec, view="pointers"))
    assert gemm.supports(listed, DEVICE) is None
    assert gemm.supports(SQUARE, DEVICE) == "takes lists of addresses only"
    assert strided.supports(listed, DEVICE) == "takes strided batches only"
    biased = replace(listed, spec=replace(listed.spec, bias=DType.float32))
    assert gemm.supports(biased, DEVICE) == "does not take a bias"
    assert (
        gemm.supports(replace(listed, N=2**31), DEVICE)
        == "takes extents and row strides up to 2147483647"
    )
    assert gemm.supports(listed, replace(DEVICE, evidence=EMULATED)) == "runs on real devices only"
