"""cuBLAS as a second way to compute a strided batched GEMM: a partner for parity, and often the fastest.

Its function is called through ctypes: CuPy's wrapper replaces the stream by CuPy's current one inside each call, and of
the versions supported some refuse to be captured in a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kernelseam.blas import ColumnProduct, Handles, StridedBatchedGemm, column_product, scalars
from kernelseam.contract import Device
from kernelseam.descriptors.gemm_problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

# cudaDataType and cublasComputeType_t, library_types.h and cublas_api.h. PEDANTIC: IEEE float32, never TF32.
_TYPES = {DType.float16: 2, DType.bfloat16: 14, DType.float32: 0, DType.float64: 1}
_COMPUTE = {DType.float16: 68, DType.bfloat16: 68, DType.float32: 69, DType.float64: 70}
_ALGORITHM = -1
_FULL_PRECISION_REDUCTION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay float32
_ALLOC_FAILED = 3
_INT, _WIDE, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p


class CublasGemm(StridedBatchedGemm):
    """kernelseam.contract.Implementation over cublasGemmStridedBatchedEx."""

    name, backend, function, efficiency = "cublas", "cuda", "cublasGemmStridedBatchedEx", 0.75

    def unavailable(self) -> str | None:
        return unavailable()

    def bind(self, problem: GemmProblem, device: Device, pointers: Mapping[str, int]) -> Callable[[int], None]:
        held = scalars(problem)
        packed = arguments(column_product(problem, pointers), *map(ctypes.addressof, held))
        handle, lock = _handles.of(device)
        name, gemm, set_stream = self.function, getattr(library(), self.function), library().cublasSetStream_v2

        def launch(stream: int, keep: object = held) -> None:
            with lock:  # the stream is a property of the handle
                if status := set_stream(handle, _POINTER(stream)):
                    raise _failure("cublasSetStream", status)
                if status := gemm(handle, *packed):
                    raise _failure(name, status)

        return launch


def arguments(x: ColumnProduct, alpha: int, beta: int) -> tuple[Any, ...]:
    """The function's arguments after the handle; ``alpha`` and ``beta`` are host addresses."""

    def matrix(address: int, dtype: DType, lead: int, stride: int) -> tuple[Any, ...]:
        return _POINTER(address), _INT(_TYPES[dtype]), _INT(lead), _WIDE(stride)

    first, second, result = (matrix(f.address, f.dtype, f.lead, f.stride) for f in (x.first, x.second, x.result))
    return (
        _INT(x.first.transposed), _INT(x.second.transposed), _INT(x.m), _INT(x.n), _INT(x.k), _POINTER(alpha), *first,
        *second, _POINTER(beta), *result, _INT(x.count), _INT(_COMPUTE[x.first.dtype]), _INT(_ALGORITHM),
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


def _create() -> Any:
    blas, handle = library(), _POINTER()
    if status := blas.cublasCreate_v2(ctypes.byref(handle)):
        raise _failure("cublasCreate", status)
    if status := blas.cublasSetMathMode(handle, _INT(_FULL_PRECISION_REDUCTION)):
        raise _failure("cublasSetMathMode", status)
    return handle


_handles = Handles(_create)


def _failure(name: str, status: int) -> DeviceError:
    text = library().cublasGetStatusName(_INT(status))
    kind = OutOfDeviceMemory if status == _ALLOC_FAILED else DeviceError
    return kind(f"{name} failed with {text.decode(errors='replace') if text else 'an unknown status'} ({status})")
