"""hipBLAS as a second way to compute a batched GEMM: a partner for parity, and often the
fastest."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kernelseam.blas import BatchedGemm, ColumnProduct, Factor, Handles, column_product, scalars
from kernelseam.contract import Coefficients, Device
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, NoDevice, OutOfDeviceMemory

from kernelseam_rocm import archs, bindings

_TYPES = {
    DType.float16: "HIP_R_16F",
    DType.bfloat16: "HIP_R_16BF",
    DType.float32: "HIP_R_32F",
    DType.float64: "HIP_R_64F",
}
_KINDS: dict[str, type[DeviceError]] = {
    "HIPBLAS_STATUS_NOT_INITIALIZED": NoDevice,
    "HIPBLAS_STATUS_ALLOC_FAILED": OutOfDeviceMemory,
}
_FIRST_VERSION = 7
"""Before ROCm 7 the same functions took other enumerations."""


class HipBlasGemm(BatchedGemm):
    """kernelseam.contract.Implementation over hipblasGemmStridedBatchedEx."""

    name, backend, function = "hipblas", "rocm", "hipblasGemmStridedBatchedEx"

    def unavailable(self) -> str | None:
        return _unavailable()

    def coefficients(self, arch: str) -> Coefficients | None:
        return archs.COSTS.get(arch)

    def bind(
        self, problem: GemmProblem, device: Device, pointers: Mapping[str, int]
    ) -> Callable[[int], None]:
        blas, held = bindings.module("hipblas"), scalars(problem)
        packed = arguments(column_product(problem, pointers), *map(ctypes.addressof, held))
        handle, lock = _handles.of(device)
        name, gemm, set_stream = self.function, getattr(blas, self.function), blas.hipblasSetStream

        def launch(stream: int, keep: object = held) -> None:
            with lock:  # the stream is a property of the handle
                _check("hipblasSetStream", set_stream(handle, stream))
                _check(name, gemm(handle, *packed))

        return launch


class HipBlasBatchedGemm(HipBlasGemm):
    """kernelseam.contract.Implementation over hipblasGemmBatchedEx: lists of addresses in device
    memory."""

    name, view, function = "hipblas-batched", "pointers", "hipblasGemmBatchedEx"


def arguments(x: ColumnProduct, alpha: int, beta: int) -> tuple[Any, ...]:
    """The function's arguments after the handle; ``alpha`` and ``beta`` are host addresses."""
    blas, types = bindings.module("hipblas"), bindings.hip().hipDataType
    turn = {False: blas.hipblasOperation_t.HIPBLAS_OP_N, True: blas.hipblasOperation_t.HIPBLAS_OP_T}
    computes = blas.hipblasComputeType_t
    compute = (
        computes.HIPBLAS_COMPUTE_64F
        if x.summed_in is DType.float64
        else computes.HIPBLAS_COMPUTE_32F
    )

    def matrix(f: Factor) -> tuple[Any, ...]:
        where = f.address, getattr(types, _TYPES[f.dtype]), f.lead
        return where if f.stride is None else (*where, f.stride)

    first, second, result = map(matrix, (x.first, x.second, x.result))
    return (
        turn[x.first.transposed],
        turn[x.second.transposed],
        x.m,
        x.n,
        x.k,
        alpha,
        *first,
        *second,
        beta,
        *result,
        x.count,
        compute,
        blas.hipblasGemmAlgo_t.HIPBLAS_GEMM_DEFAULT,
    )


@cache
def _unavailable() -> str | None:
    """Why hipBLAS cannot be used here, or None."""
    try:
        blas = bindings.module("hipblas")
        version = bindings.call("hipRuntimeGetVersion") // 10_000_000
        if version < _FIRST_VERSION:
            return f"needs ROCm {_FIRST_VERSION} or newer; the runtime here is of ROCm {version}"
        status, handle = blas.hipblasCreate()
        _check("hipblasCreate", (status,))
        _check("hipblasDestroy", blas.hipblasDestroy(handle))
    except (DeviceError, RuntimeError) as e:
        return f"hipBLAS cannot be used: {e}"
    return None


def _create() -> Any:
    status, handle = bindings.module("hipblas").hipblasCreate()
    _check("hipblasCreate", (status,))
    return handle


_handles = Handles(_create)


def _check(name: str, result: tuple[Any, ...]) -> None:
    status = result[0]
    if int(status):
        raise _KINDS.get(status.name, DeviceError)(
            f"{name} failed with {status.name} ({int(status)})"
        )
