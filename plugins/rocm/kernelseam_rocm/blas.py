"""hipBLAS as a second way to compute a strided batched GEMM: a partner for parity, and often the fastest."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts
from kernelseam.descriptors.gemm_problem import GemmProblem
from kernelseam.dispatch import roofline
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, NoDevice
from kernelseam_rocm import bindings

_TYPES = {
    DType.float16: "HIP_R_16F", DType.bfloat16: "HIP_R_16BF", DType.float32: "HIP_R_32F", DType.float64: "HIP_R_64F",
}
_LIMIT = 2**31 - 1
_FIRST_VERSION = 7
"""Before ROCm 7 the same function took other enumerations."""


class HipBlasGemm:
    """kernelseam.contract.Implementation over hipblasGemmStridedBatchedEx."""

    name, backend, operation = "hipblas", "rocm", "gemm"

    def supports(self, problem: GemmProblem, device: Device) -> str | None:
        spec = problem.spec
        if spec.view != "strided":
            return "takes strided batches only"
        if spec.dtype_c not in (spec.dtype, spec.dtype_acc):
            return f"has no {spec.dtype} product with a {spec.dtype_c} result"
        if spec.dtype_acc is not spec.dtype.accumulator:
            return f"does not sum {spec.dtype} products in {spec.dtype_acc}"
        if problem.matrix_strides is None:
            return "takes one stride over all matrices, and batch and head are not evenly spaced"
        rows = (problem.a_strides[2], problem.b_strides[2], problem.c_strides[2])
        if max(problem.M, problem.N, problem.K, problem.matrices, *rows) > _LIMIT:
            return f"takes extents and row strides up to {_LIMIT}"
        widths = (problem.a_shape[1], problem.b_shape[1], problem.N)
        if any(row < width for row, width in zip(rows, widths, strict=True)):
            return "takes rows that do not overlap: a row stride is smaller than its row"
        return _unavailable()

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, efficiency=0.8)

    def build(self, problem: GemmProblem, device: Device) -> PlanParts:
        if 0 in (problem.M, problem.N, problem.matrices):
            return PlanParts(())
        return PlanParts((_Step(problem, device),))


@dataclass(frozen=True)
class _Step:
    """One call of the library."""

    problem: GemmProblem
    device: Device

    @property
    def record(self) -> LaunchRecord:
        return LaunchRecord("hipblasGemmStridedBatchedEx", (1, 1, 1), (1, 1, 1), 0, self.device.arch, "library")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, blas = self.problem, bindings.module("hipblas")
        scalar = ctypes.c_double if p.spec.dtype_acc is DType.float64 else ctypes.c_float
        scalars = scalar(p.alpha if p.reads_inputs else 0.0), scalar(p.beta)
        packed = arguments(p, pointers, *map(ctypes.addressof, scalars))
        handle, lock = _handle(self.device.index)
        gemm, set_stream = blas.hipblasGemmStridedBatchedEx, blas.hipblasSetStream

        def launch(stream: int, keep: object = scalars) -> None:
            with lock:  # the stream is a property of the handle
                _check("hipblasSetStream", set_stream(handle, stream))
                _check("hipblasGemmStridedBatchedEx", gemm(handle, *packed))

        return launch


def arguments(p: GemmProblem, pointers: Mapping[str, int], alpha: int, beta: int) -> tuple[Any, ...]:
    """The function's arguments after the handle; ``alpha`` and ``beta`` are host addresses.

    The library stores columns: the transpose of our row-major C is op(B)ᵀ·op(A)ᵀ, so B comes first and M and N change
    places.
    """
    s, strides = p.spec, p.matrix_strides
    assert strides is not None
    blas, types = bindings.module("hipblas"), bindings.hip().hipDataType
    turn = {False: blas.hipblasOperation_t.HIPBLAS_OP_N, True: blas.hipblasOperation_t.HIPBLAS_OP_T}
    kind, kind_c = getattr(types, _TYPES[s.dtype]), getattr(types, _TYPES[s.dtype_c])
    computes = blas.hipblasComputeType_t
    compute = computes.HIPBLAS_COMPUTE_64F if s.dtype_acc is DType.float64 else computes.HIPBLAS_COMPUTE_32F
    a_lead, b_lead, c_lead = (max(rows, 1) for rows in (p.a_strides[2], p.b_strides[2], p.c_strides[2]))
    c = pointers["C"]
    a, b = (pointers.get(name) or c for name in "AB")
    return (
        turn[s.b_transposed], turn[s.a_transposed], p.N, p.M, p.K if p.reads_inputs else 0,
        alpha, b, kind, b_lead, strides[1], a, kind, a_lead, strides[0],
        beta, c, kind_c, c_lead, strides[2], p.matrices, compute, blas.hipblasGemmAlgo_t.HIPBLAS_GEMM_DEFAULT,
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


_handles: dict[int, tuple[Any, threading.Lock]] = {}
_handles_lock = threading.Lock()


def _handle(index: int) -> tuple[Any, threading.Lock]:
    """The process's handle of a device, which is current, and the lock that guards it."""
    with _handles_lock:
        if index not in _handles:
            status, handle = bindings.module("hipblas").hipblasCreate()
            _check("hipblasCreate", (status,))
            _handles[index] = handle, threading.Lock()
        return _handles[index]


def _check(name: str, result: tuple[Any, ...]) -> None:
    status = result[0]
    if int(status):
        kind = NoDevice if status.name == "HIPBLAS_STATUS_NOT_INITIALIZED" else DeviceError
        raise kind(f"{name} failed with {status.name} ({int(status)})")
