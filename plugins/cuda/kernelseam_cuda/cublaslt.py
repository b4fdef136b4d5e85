"""cuBLASLt through ctypes: its attributes by name and value, and the descriptors that carry them.

Names, values and types are those of cublasLt.h. The library refuses a value of another size than it
stores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

from kernelseam.frozen import dataclass

from kernelseam_cuda import blas

_INT, _SIZE, _I64, _U64, _POINTER = (
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_void_p,
)


@dataclass(frozen=True)
class Attribute:
    """One value of a descriptor."""

    name: str
    number: int
    type: Any


# cublasLtMatrixLayoutAttribute_t
BATCH_COUNT = Attribute("CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT", 5, ctypes.c_int32)
BATCH_STRIDE = Attribute("CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET", 6, _I64)

# cublasLtMatmulDescAttributes_t. The library's A, B, C and D are column-major.
TRANSPOSE_A = Attribute("CUBLASLT_MATMUL_DESC_TRANSA", 3, ctypes.c_int32)
TRANSPOSE_B = Attribute("CUBLASLT_MATMUL_DESC_TRANSB", 4, ctypes.c_int32)
EPILOGUE = Attribute("CUBLASLT_MATMUL_DESC_EPILOGUE", 7, ctypes.c_uint32)
BIAS_ADDRESS = Attribute("CUBLASLT_MATMUL_DESC_BIAS_POINTER", 8, _POINTER)
BIAS_STRIDE = Attribute("CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE", 10, _I64)

# cublasLtMatmulPreferenceAttributes_t
MAX_WORKSPACE = Attribute("CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES", 1, _U64)
REDUCTIONS = Attribute("CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK", 3, ctypes.c_uint32)
ALIGNMENT_A = Attribute("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES", 5, ctypes.c_uint32)
ALIGNMENT_B = Attribute("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES", 6, ctypes.c_uint32)
ALIGNMENT_C = Attribute("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES", 7, ctypes.c_uint32)
ALIGNMENT_D = Attribute("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES", 8, ctypes.c_uint32)

CUBLASLT_EPILOGUE_BIAS = 4
"""cublasLtEpilogue_t: a vector as long as D has rows is added to each of D's columns."""
CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
"""cublasLtReductionScheme_t: where K is split, partial sums stay as wide as the accumulator and are
added up in one order. A mask of it allows K whole too."""
WORKSPACE_ALIGNMENT = 256
"""Bytes that the address of a workspace must be a multiple of."""

NO_ALGORITHM = (7, 8, 15)
"""CUBLAS_STATUS_INVALID_VALUE, _ARCH_MISMATCH and _NOT_SUPPORTED: the heuristic's statuses for
problems that it does not support."""


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _U64 * 8),
        ("workspace_bytes", _SIZE),
        ("state", _INT),
        ("waves", ctypes.c_float),
        ("reserved", _INT * 4),
    )


_DESCRIPTORS = {
    "MatrixLayout": (_INT, _U64, _U64, _I64),  # type, rows, columns, from column to column
    "MatmulDesc": (_INT, _INT),  # what products are summed in, type of alpha and beta
    "MatmulPreference": (),
}
"""The arguments that create each kind."""
_PROTOTYPES = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*[_POINTER] * 7, _INT, _POINTER, _POINTER),
    # handle, product, alpha, A, its layout, B, its layout, beta, C, its layout, D, its layout,
    # algorithm, workspace, its bytes, stream
    "cublasLtMatmul": (*[_POINTER] * 14, _SIZE, _POINTER),
    **{f"cublasLt{kind}Create": (_POINTER, *types) for kind, types in _DESCRIPTORS.items()},
    **{f"cublasLt{kind}SetAttribute": (_POINTER, _INT, _POINTER, _SIZE) for kind in _DESCRIPTORS},
    **{f"cublasLt{kind}Destroy": (_POINTER,) for kind in _DESCRIPTORS},
}


@cache
def library() -> Any:
    """cuBLASLt, wherever a wheel, conda or the system put it. Raises DeviceError saying what to
    install."""
    lib = blas.load("cublasLt", "cuBLASLt")
    for name, types in _PROTOTYPES.items():
        getattr(lib, name).argtypes = types
    lib.cublasLtGetStatusName.restype = ctypes.c_char_p
    return lib


@cache
def unavailable() -> str | None:
    """Why cuBLASLt cannot be used here, or None."""
    return blas.missing(library)


def status_name(status: int) -> str:
    """The status's name in the header."""
    text = library().cublasLtGetStatusName(status)
    return text.decode(errors="replace") if text else f"status {status}"


def check(name: str, status: int) -> None:
    """Raise what a status that is not success means."""
    if status:
        raise blas.failure(name, status, library().cublasLtGetStatusName(status))


class LtDescriptor:
    """A descriptor in the library's memory, destroyed with its last reference and never changed."""

    def __init__(self, kind: str, *arguments: int, attributes: Mapping[Attribute, int]) -> None:
        """``kind``: "MatrixLayout", "MatmulDesc" or "MatmulPreference", with the
        arguments of its creation."""
        lt, handle = library(), _POINTER()
        check(
            f"cublasLt{kind}Create",
            getattr(lt, f"cublasLt{kind}Create")(ctypes.byref(handle), *arguments),
        )
        self.handle, self._destroy = handle, getattr(lt, f"cublasLt{kind}Destroy")
        set_attribute = getattr(lt, f"cublasLt{kind}SetAttribute")
        for attribute, number in attributes.items():
            value = attribute.type(number)
            status = set_attribute(
                handle, attribute.number, ctypes.byref(value), ctypes.sizeof(value)
            )
            check(f"cublasLt{kind}SetAttribute of {attribute.name}", status)

    def __del__(self) -> None:
        if destroy := getattr(self, "_destroy", None):
            destroy(self.handle)


def create() -> Any:
    """The library's handle for the current device."""
    handle = _POINTER()
    check("cublasLtCreate", library().cublasLtCreate(ctypes.byref(handle)))
    return handle
