"""Arrays on NVIDIA GPUs, of any library that is loaded, recognised by their types: no library is
imported for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue, OutOfDeviceMemory, UnknownName
from kernelseam.frozen import dataclass

from kernelseam_cuda import bindings

_DLPACK_CUDA = 2  # kDLCUDA
_Reader = Callable[[Any, Sequence[Device]], ArrayInfo | None]


@dataclass(frozen=True)
class _Borrowed(ArrayInfo):
    """A view obtained through cupy, which must live as long as its address is used."""

    view: object = None


def describe(array: object, devices: Sequence[Device]) -> ArrayInfo | None:
    """The array's view, or None if it is not on one of the devices (all there are, in order of
    their index).

    Raises UnknownName for element types, InvalidValue for layouts, that the contract does not have.
    """
    if not devices:
        return None
    reader = _readers.get(type(array)) or _reader(array)
    return reader(array, devices)


def _not_on_gpu(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    return None


_readers: dict[type, _Reader] = dict.fromkeys((np.ndarray, int, float, list, tuple), _not_on_gpu)
_dtypes: dict[Any, DType] = {}


def _reader(array: object) -> _Reader:
    """How arrays of this type are read; remembered for the libraries known by name."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    reader: _Reader
    if isinstance(array, getattr(torch, "Tensor", ())):
        reader = _torch if getattr(getattr(torch, "version", None), "cuda", None) else _not_on_gpu
    elif isinstance(array, getattr(cupy, "ndarray", ())):
        reader = _not_on_gpu if _is_hip(cupy) else _cupy
    else:
        return _foreign
    _readers[type(array)] = reader
    return reader


def _is_hip(cupy: Any) -> bool:
    """Whether cupy is built for another vendor's GPUs: both builds share the name."""
    return bool(getattr(getattr(getattr(cupy, "cuda", None), "runtime", None), "is_hip", False))


def _cupy(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    memory, strides = array.data, array.strides
    dtype = _dtypes.get(array.dtype) or _dtypes.setdefault(
        array.dtype, DType.of(array.dtype, floating=False)
    )
    return ArrayInfo(
        memory.ptr,
        array.shape,
        _elements(strides, dtype.itemsize),
        dtype,
        devices[memory.device_id],
        "cupy",
        array,
    )


def _torch(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    if not array.is_cuda:
        return None
    return torch_arrays.describe(array, devices[array.get_device()])


def _foreign(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """An array of another library. DLPack first: it names the device and orders the
    producer's stream before ours."""
    kind = type(array)
    if hasattr(kind, "__dlpack_device__"):
        device_type, index = array.__dlpack_device__()
        if int(device_type) != _DLPACK_CUDA:
            return None
        view = bindings.cupy().from_dlpack(array)
        info = _cupy(view, devices)
        assert info is not None
        return _Borrowed(
            info.pointer,
            info.shape,
            info.strides,
            info.dtype,
            devices[int(index)],
            _library(kind),
            array,
            view=view,
        )
    interface = getattr(array, "__cuda_array_interface__", None)
    return None if interface is None else _interface(array, interface, devices)


def _interface(
    array: object, interface: dict[str, Any], devices: Sequence[Device]
) -> ArrayInfo | None:
    if interface.get("mask") is not None:
        raise InvalidValue(
            "mask",
            "an array",
            "masked elements have no meaning here",
            "Fill them, and pass the data",
        )
    pointer, read_only = interface["data"]
    index = _device_of(pointer) if pointer else 0
    if index is None:
        return None
    dtype, shape = (
        DType.of(np.dtype(interface["typestr"]), floating=False),
        tuple(interface["shape"]),
    )
    strides = interface.get("strides")
    if (stream := interface.get("stream")) is not None:
        bindings.call("cuStreamSynchronize", stream)  # required by version 3 of the interface
    return ArrayInfo(
        pointer or 0,
        shape,
        row_major(shape) if strides is None else _elements(strides, dtype.itemsize),
        dtype,
        devices[index],
        _library(type(array)),
        array,
        not read_only,
    )


def _device_of(pointer: int) -> int | None:
    """The index of the device that holds an address, or None where the driver does not know the
    address."""
    driver = bindings.driver()
    what = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, index = driver.cuPointerGetAttribute(what, pointer)
    return None if status else int(index)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _elements(strides: Sequence[int], size: int) -> tuple[int, ...]:
    """Strides in bytes → in elements."""
    if any(s % size for s in strides):
        raise UnknownName(
            "strides",
            tuple(strides),
            f"must be multiples of the {size}-byte element",
            "Copy the field into an array of its own",
        )
    return tuple([s // size for s in strides])


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a packed array."""
    strides, step = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def empty(shape: Sequence[int], dtype: DType, device: Device, kind: str | None) -> object:
    """A new row-major array on the current device: torch's where ``kind`` says so, else cupy's.

    Raises OutOfDeviceMemory; NoDevice where cupy is needed and missing; DeviceError.
    """
    try:
        if kind == "torch":
            return torch_arrays.empty(shape, dtype, f"cuda:{device.index}")
        return bindings.cupy().empty(tuple(shape), dtype.numpy)
    except DeviceError:
        raise
    # a context that is lost has its libraries raise errors of their own
    except (MemoryError, RuntimeError) as e:
        # cupy's, torch's
        out_of_memory = isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError"
        error = OutOfDeviceMemory if out_of_memory else DeviceError
        raise error(f"allocating {list(shape)} of {dtype} on {device} failed: {e}") from e


def current_stream(device: Device, kind: str | None) -> int:
    """The handle of the stream that the array's library uses now: torch's for its tensors, else
    cupy's.

    0, the default stream, where cupy is not loaded.
    """
    if kind == "torch":
        return stream_getter(device, kind)()
    cupy: Any = sys.modules.get("cupy")
    return (
        0 if cupy is None or _is_hip(cupy) else int(cupy.cuda.get_current_stream(device.index).ptr)
    )


def current_streams(device: Device) -> set[int]:
    """The handles of the streams that torch and cupy use now, as far as they are loaded."""
    torch: Any = sys.modules.get("torch")
    initialised = torch is not None and torch.cuda.is_initialized()
    return {
        current_stream(device, None),
        *([stream_getter(device, "torch")()] if initialised else ()),
    }


def stream_getter(device: Device, kind: str | None) -> Callable[[], int]:
    """A function that returns ``current_stream`` of one device and library."""
    if kind != "torch":
        return partial(current_stream, device, kind)
    torch: Any = sys.modules["torch"]
    # torch's compiler uses it; torch.cuda.current_stream is slow
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return (
        partial(raw, device.index)
        if raw
        else lambda: int(torch.cuda.current_stream(device.index).cuda_stream)
    )
