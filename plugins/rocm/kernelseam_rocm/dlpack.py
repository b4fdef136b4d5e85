"""DLPack's structures, read and written: the way of an array between libraries without a copy.

Source: dlpack.h, the unversioned form ("dltensor" capsules), which every library still speaks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from kernelseam.dtypes import DType

ROCM = 10
"""kDLROCM."""

_CODES = {
    DType.float16: (2, 16),
    DType.bfloat16: (4, 16),
    DType.float32: (2, 32),
    DType.float64: (2, 64),
    DType.int32: (0, 32),
    DType.boolean: (6, 8),
    DType.int64: (0, 64),
    DType.int16: (0, 16),
    DType.int8: (0, 8),
    DType.uint8: (1, 8),
    DType.float8_e4m3fn: (10, 8),
    DType.float8_e4m3fnuz: (11, 8),
}
_NAME, _USED = b"dltensor", b"used_dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]

_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
# In a destructor the capsule is being destroyed: it must be passed as an address, without a new
# reference.
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


@dataclass(frozen=True)
class View:
    """What a capsule says: address of the first element, shape, strides in elements, dtype's name,
    device index."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    index: int


def read(capsule: Any) -> View:
    """The view in a capsule. The capsule is not consumed: dropping it gives the export back, so the
    array that it came from must be kept alive by the caller."""
    t = ctypes.cast(_pointer(capsule, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(t.shape[i] for i in range(t.ndim))
    strides = tuple(t.strides[i] for i in range(t.ndim)) if t.strides else row_major(shape)
    return View((t.data or 0) + t.byte_offset, shape, strides, _dtype_name(t), t.device_id)


def _dtype_name(t: _Tensor) -> str:
    for dtype, (code, bits) in _CODES.items():
        if (t.code, t.bits, t.lanes) == (code, bits, 1):
            return dtype.value
    known = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
    kind = known.get(t.code, f"dlpack type {t.code} of ")
    return f"{kind}{t.bits}" + (f" × {t.lanes}" if t.lanes != 1 else "")


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array whose last axis is contiguous and that has no gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


_exported: dict[int, tuple[object, ...]] = {}
"""What each export keeps alive, by the address of its structure, until its consumer gives it
back."""


@_DELETER  # type: ignore[untyped-decorator]
def _release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


@_DESTRUCTOR  # type: ignore[untyped-decorator]
def _destroy(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # no consumer took it
        _exported.pop(_address(capsule, _NAME), None)


def write(pointer: int, shape: tuple[int, ...], dtype: DType, index: int, owner: object) -> Any:
    """A capsule over row-major device memory; ``owner`` lives until the consumer is done."""
    n = len(shape)
    extents, strides = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*row_major(shape))
    code, bits = _CODES[dtype]
    managed = _Managed(
        _Tensor(pointer, ROCM, index, n, code, bits, 1, extents, strides, 0), None, _release
    )
    address = ctypes.addressof(managed)
    _exported[address] = (managed, extents, strides, owner)
    return _new(address, _NAME, _destroy)
