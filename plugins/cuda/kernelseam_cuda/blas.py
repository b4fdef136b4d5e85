"""cuBLAS as a second way to compute a strided batched GEMM: a partner for parity, and often the fastest.

Its function is called through ctypes: CuPy's wrapper replaces the stream by CuPy's current one inside each call, and of
the versions supported some refuse to be captured in a graph.
"""

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
from kernelseam.errors import DeviceError, OutOfDeviceMemory

# cudaDataType and cublasComputeType_t, library_types.h and cublas_api.h. PEDANTIC: IEEE float32, never TF32.
_TYPES = {DType.float16: 2, DType.bfloat16: 14, DType.float32: 0, DType.float64: 1}
_COMPUTE = {DType.float16: 68, DType.bfloat16: 68, DType.float32: 69, DType.float64: 70}
_ALGORITHM = -1
_FULL_PRECISION_REDUCTION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay float32
_ALLOC_FAILED = 3
_FUNCTION = "cublasGemmStridedBatchedEx"
_INT, _WIDE, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_LIMIT = 2**31 - 1


class CublasGemm:
    """kernelseam.contract.Implementation over cublasGemmStridedBatchedEx."""

    name, backend, operation = "cublas", "cuda", "gemm"

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
        return unavailable()

    def cost(self, problem: GemmProblem, device: Device) -> Cost:
        return roofline(problem, device.limits, efficiency=0.75)

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
        return LaunchRecord("cublasGemmStridedBatchedEx", (1, 1, 1), (1, 1, 1), 0, self.device.arch, "library")

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        p, blas = self.problem, library()
        scalar = ctypes.c_double if p.spec.dtype_acc is DType.float64 else ctypes.c_float
        scalars = scalar(p.alpha if p.reads_inputs else 0.0), scalar(p.beta)
        packed = arguments(p, pointers, *map(ctypes.addressof, scalars))
        handle, lock = _handle(self.device.index)
        gemm, set_stream = getattr(blas, _FUNCTION), blas.cublasSetStream_v2

        def launch(stream: int, keep: object = scalars) -> None:
            with lock:  # the stream is a property of the handle
                if status := set_stream(handle, _POINTER(stream)):
                    raise _failure("cublasSetStream", status)
                if status := gemm(handle, *packed):
                    raise _failure(_FUNCTION, status)

        return launch


def arguments(p: GemmProblem, pointers: Mapping[str, int], alpha: int, beta: int) -> tuple[Any, ...]:
    """The function's arguments after the handle; ``alpha`` and ``beta`` are host addresses.

    The library stores columns: the transpose of our row-major C is op(B)ᵀ·op(A)ᵀ, so B comes first and M and N change
    places.
    """
    s, strides = p.spec, p.matrix_strides
    assert strides is not None
    a_stride, b_stride, c_stride = map(_WIDE, strides)
    a_lead, b_lead, c_lead = (_INT(max(rows, 1)) for rows in (p.a_strides[2], p.b_strides[2], p.c_strides[2]))
    kind, kind_c = _INT(_TYPES[s.dtype]), _INT(_TYPES[s.dtype_c])
    c = pointers["C"]
    a, b = (_POINTER(pointers.get(name) or c) for name in "AB")
    return (
        _INT(s.b_transposed), _INT(s.a_transposed), _INT(p.N), _INT(p.M), _INT(p.K if p.reads_inputs else 0),
        _POINTER(alpha), b, kind, b_lead, b_stride, a, kind, a_lead, a_stride,
        _POINTER(beta), _POINTER(c), kind_c, c_lead, c_stride,
        _INT(p.matrices), _INT(_COMPUTE[s.dtype]), _INT(_ALGORITHM),
    )


@cache
def library() -> Any:
    """cuBLAS, wherever a wheel, conda or the system put it. Raises DeviceError saying what to install."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except (ImportError, RuntimeError, OSError) as e:
        reason = str(e).partition("\n")[0]
        raise DeviceError(
            f"cuBLAS cannot be loaded ({reason}): install nvidia-cublas, or nvidia-cublas-cu12 for CUDA 12"
        ) from e
    found.cublasGetStatusName.restype = ctypes.c_char_p
    return found


@cache
def unavailable() -> str | None:
    """Why the library cannot be used here, or None."""
    try:
        library()
    except DeviceError as e:
        return str(e)
    return None


_handles: dict[int, tuple[Any, threading.Lock]] = {}
_handles_lock = threading.Lock()


def _handle(index: int) -> tuple[Any, threading.Lock]:
    """The process's handle of a device, which is current, and the lock that guards it."""
    with _handles_lock:
        if index not in _handles:
            blas, handle = library(), _POINTER()
            if status := blas.cublasCreate_v2(ctypes.byref(handle)):
                raise _failure("cublasCreate", status)
            if status := blas.cublasSetMathMode(handle, _INT(_FULL_PRECISION_REDUCTION)):
                raise _failure("cublasSetMathMode", status)
            _handles[index] = handle, threading.Lock()
        return _handles[index]


def _failure(name: str, status: int) -> DeviceError:
    text = library().cublasGetStatusName(_INT(status))
    kind = OutOfDeviceMemory if status == _ALLOC_FAILED else DeviceError
    return kind(f"{name} failed with {text.decode(errors='replace') if text else 'an unknown status'} ({status})")
