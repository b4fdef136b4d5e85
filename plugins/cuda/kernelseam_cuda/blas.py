"""cuBLAS as a second way to compute a batched GEMM: a partner for parity, and often the fastest.

Its functions are called through ctypes: CuPy's wrappers replace the stream by CuPy's current one
inside each call, and of the versions supported some refuse to be captured in a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kernelseam.blas import (
    BatchedGemm,
    BlasMatrix,
    ColumnMajorGemm,
    Handles,
    column_major_gemm,
    scalars,
)
from kernelseam.contract import Coefficients, Device
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

from kernelseam_cuda import archs

# cudaDataType and cublasComputeType_t, library_types.h and cublas_api.h. PEDANTIC: IEEE float32,
# never TF32.
TYPES = {DType.float16: 2, DType.bfloat16: 14, DType.float32: 0, DType.float64: 1}
COMPUTE = {DType.float16: 68, DType.bfloat16: 68, DType.float32: 69, DType.float64: 70}
_FAST_TF32 = 77  # CUBLAS_COMPUTE_32F_FAST_TF32: operands in TF32, products summed in float32
_ALGORITHM = -1
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay float32
_FULL_PRECISION_REDUCTION = 16
_ALLOC_FAILED = 3
_WIDEST = 16
_INT, _WIDE, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p

INSTALL = "install kernelseam-cuda[blas], or kernelseam-cuda[blas-cu12] for CUDA 12"


PRECISIONS = frozenset({"tf32"})
"""Of float32 products, beside float32's own."""


def compute_type(dtype: DType, precision: str | None) -> int:
    """The cublasComputeType_t of products of a dtype."""
    return _FAST_TF32 if precision else COMPUTE[dtype]


class CublasGemm(BatchedGemm):
    """kernelseam.contract.Implementation over cublasGemmStridedBatchedEx; of one matrix over
    cublasGemmEx, whose heuristic has more algorithms: it may split K or tiles among blocks."""

    name, backend, function = "cublas", "cuda", "cublasGemmStridedBatchedEx"
    precisions = PRECISIONS
    single = "cublasGemmEx"
    """The function for one matrix; "" where there is none."""

    def unavailable(self) -> str | None:
        return unavailable()

    def coefficients(self, arch: str) -> Coefficients | None:
        return archs.COSTS.get(arch)

    def function_of(self, problem: GemmProblem) -> str:
        return self.single if self.single and problem.matrices == 1 else self.function

    def bind(
        self, problem: GemmProblem, device: Device, pointers: Mapping[str, int]
    ) -> Callable[[int], None]:
        factors, name = scalars(problem), self.function_of(problem)
        product = column_major_gemm(problem, pointers)
        packed = arguments(product, *map(ctypes.addressof, factors), batched=name != self.single)
        handle, lock = _handles.of(device)
        gemm, set_stream, last = getattr(library(), name), library().cublasSetStream_v2, _streams

        def launch(stream: int, keep_alive: object = factors) -> None:
            with lock:  # the stream is a property of the handle
                if last.get(lock) != stream:
                    last.pop(lock, None)
                    if status := set_stream(handle, _POINTER(stream)):
                        raise _failure("cublasSetStream", status)
                    last[lock] = stream
                if status := gemm(handle, *packed):
                    raise _failure(name, status)

        return launch


class CublasBatchedGemm(CublasGemm):
    """kernelseam.contract.Implementation over cublasGemmBatchedEx: lists of addresses in device
    memory."""

    name, view, function, single = "cublas-batched", "pointers", "cublasGemmBatchedEx", ""

    def refuse(self, problem: GemmProblem) -> str | None:
        """The library cannot read addresses in device memory. Where a row stride allows wide
        accesses to 16-bit elements it may use them, and on matrices that are less aligned they
        would be a fault of the device."""
        spec, reads = problem.spec, problem.reads_inputs
        for name, vector, strides, used in (
            ("A_ptrs", spec.vector_a, problem.a_strides, reads),
            ("B_ptrs", spec.vector_b, problem.b_strides, reads),
            ("C_ptrs", spec.vector_c, problem.c_strides, True),
        ):
            if used and spec.dtype.itemsize == 2 and vector < _WIDEST and strides[2] % 2 == 0:
                return (
                    f"takes {spec.dtype} products of matrices whose rows are known to keep "
                    f"{_WIDEST}-byte alignment or "
                    f"have an odd stride, and {name} promises neither (alignment={_WIDEST} "
                    "promises it of addresses)"
                )
        return None


def arguments(
    x: ColumnMajorGemm, alpha: int, beta: int, *, batched: bool = True
) -> tuple[Any, ...]:
    """The function's arguments after the handle; ``alpha`` and ``beta`` are host addresses. Where
    it is not ``batched``, it takes one matrix, and neither strides between matrices nor their
    count."""

    def matrix(f: BlasMatrix) -> tuple[Any, ...]:
        operand = _POINTER(f.address), _INT(TYPES[f.dtype]), _INT(f.lead)
        return operand if f.stride is None or not batched else (*operand, _WIDE(f.stride))

    count = (_INT(x.count),) if batched else ()
    first, second, result = map(matrix, (x.first, x.second, x.result))
    return (
        _INT(x.first.transposed),
        _INT(x.second.transposed),
        _INT(x.m),
        _INT(x.n),
        _INT(x.k),
        _POINTER(alpha),
        *first,
        *second,
        _POINTER(beta),
        *result,
        *count,
        _INT(compute_type(x.first.dtype, x.precision)),
        _INT(_ALGORITHM),
    )


@cache
def library() -> Any:
    """cuBLAS, wherever a wheel, conda or the system put it. Raises DeviceError saying what to
    install."""
    lib = load("cublas", "cuBLAS")
    lib.cublasGetStatusName.restype = ctypes.c_char_p
    return lib


def load(name: str, title: str) -> Any:
    """One of the libraries that nvidia-cublas brings. Raises DeviceError saying what to install."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    except (ImportError, RuntimeError, OSError) as e:
        reason = str(e).partition("\n")[0]
        raise DeviceError(f"{title} cannot be loaded ({reason}): {INSTALL}") from e


def missing(library: Callable[[], Any]) -> str | None:
    """Why a library cannot be used here, or None."""
    try:
        library()
    except DeviceError as e:
        return str(e)
    return None


@cache
def unavailable() -> str | None:
    """Why cuBLAS cannot be used here, or None."""
    return missing(library)


def _create() -> Any:
    blas, handle = library(), _POINTER()
    if status := blas.cublasCreate_v2(ctypes.byref(handle)):
        raise _failure("cublasCreate", status)
    if status := blas.cublasSetMathMode(handle, _INT(_FULL_PRECISION_REDUCTION)):
        raise _failure("cublasSetMathMode", status)
    return handle


_handles = Handles(_create)
_streams: dict[Any, int] = {}
"""By the lock of a handle: the stream set on it. Only ``bind`` sets it."""


def _failure(name: str, status: int) -> DeviceError:
    return failure(name, status, library().cublasGetStatusName(_INT(status)))


def failure(name: str, status: int, text: bytes | None) -> DeviceError:
    """The error for a status that is not success, whose name is ``text``."""
    kind = OutOfDeviceMemory if status == _ALLOC_FAILED else DeviceError
    return kind(
        f"{name} failed with {text.decode(errors='replace') if text else 'an unknown status'} "
        f"({status})"
    )
