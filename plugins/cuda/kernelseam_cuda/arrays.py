"""Arrays on NVIDIA GPUs, of every library that is loaded, told apart by their attributes: no library is imported to ask."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import OutOfDeviceMemory
from kernelseam_cuda import bindings

_DLPACK_CUDA = 2


class DeviceArray:
    """Row-major memory from CuPy's pool for an element type that CuPy's arrays lack (bfloat16)."""

    def __init__(self, shape: Sequence[int], dtype: DType, device: Device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.size = 1
        for n in self.shape:
            self.size *= n
        self.memory = allocate(self.size * dtype.itemsize)
        self.pointer = int(self.memory.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As opaque elements: the protocol has no name for bfloat16."""
        return {
            "version": 3, "shape": self.shape, "typestr": f"|V{self.dtype.itemsize}", "data": (self.pointer, False),
            "strides": None,
        }

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def allocate(size: int) -> Any:
    """Memory of CuPy's pool on the current device. Raises OutOfDeviceMemory."""
    cupy = bindings.cupy()
    try:
        return cupy.cuda.alloc(size)
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise OutOfDeviceMemory(str(e)) from e


def torch_module() -> Any | None:
    """torch if it is loaded and built for CUDA."""
    torch = sys.modules.get("torch")
    return torch if getattr(getattr(torch, "version", None), "cuda", None) else None


def cupy_module() -> Any | None:
    """cupy if it is loaded and built for CUDA."""
    cupy = sys.modules.get("cupy")
    runtime = getattr(getattr(cupy, "cuda", None), "runtime", None)
    return None if runtime is None or runtime.is_hip else cupy


def describe(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """The array's view, or None if it is not on one of the devices. Raises UnknownName for other element types."""
    if isinstance(array, DeviceArray):
        return ArrayInfo(
            array.pointer, array.shape, row_major(array.shape), array.dtype, array.device, "kernelseam", array
        )
    if not devices:
        return None
    if (torch := torch_module()) is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cuda":
            return None
        return ArrayInfo(
            array.data_ptr(), tuple(array.shape), tuple(array.stride()), _torch_dtype(array.dtype),
            devices[array.device.index], "torch", array,
        )
    if (cupy := cupy_module()) is not None and isinstance(array, cupy.ndarray):
        return ArrayInfo(
            array.data.ptr, array.shape, _elements(array.strides, array.itemsize), _dtype(array.dtype.name),
            devices[array.device.id], "cupy", array,
        )
    return _interface(array, devices) or _dlpack(array, devices)


def _interface(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """An array of a library that we do not know, through __cuda_array_interface__."""
    facts = getattr(array, "__cuda_array_interface__", None)
    if facts is None:
        return None
    pointer, read_only = facts["data"]
    index = bindings.cupy().cuda.runtime.pointerGetAttributes(pointer).device if pointer else 0
    if not 0 <= index < len(devices):
        return None  # another vendor's memory, or the host's
    dtype = _dtype(np.dtype(facts["typestr"]).name)
    shape, strides = tuple(facts["shape"]), facts.get("strides")
    return ArrayInfo(
        pointer,
        shape,
        row_major(shape) if strides is None else _elements(strides, dtype.itemsize),
        dtype,
        devices[index],
        type(array).__module__.partition(".")[0],
        array,
        not read_only,
    )


def _dlpack(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """An array of a library that we do not know, through DLPack, read by CuPy."""
    where = getattr(type(array), "__dlpack_device__", None)
    if where is None or int(where(array)[0]) != _DLPACK_CUDA:
        return None
    seen = bindings.cupy().from_dlpack(array)
    return ArrayInfo(
        seen.data.ptr, seen.shape, _elements(seen.strides, seen.itemsize), _dtype(seen.dtype.name), devices[seen.device.id],
        type(array).__module__.partition(".")[0], array,
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of an array without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _elements(strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(s // itemsize for s in strides)


def _dtype(name: str) -> DType:
    return DType.of(name, "dtype")


_torch_dtypes: dict[Any, DType] = {}


def _torch_dtype(dtype: Any) -> DType:
    found = _torch_dtypes.get(dtype)
    if found is None:
        found = _torch_dtypes[dtype] = _dtype(str(dtype).removeprefix("torch."))
    return found


def empty(shape: Sequence[int], dtype: DType, device: Device, kind: str | None) -> object:
    """A new row-major array on the current device: torch's for torch, else CuPy's, else (bfloat16) a DeviceArray."""
    if kind == "torch" and (torch := torch_module()) is not None:
        try:
            return torch.empty(tuple(shape), dtype=getattr(torch, dtype.value), device=f"cuda:{device.index}")
        except torch.OutOfMemoryError as e:
            raise OutOfDeviceMemory(str(e)) from e
    cupy = bindings.cupy()
    if dtype is DType.bfloat16:
        return DeviceArray(shape, dtype, device)
    try:
        return cupy.empty(tuple(shape), dtype=dtype.numpy)
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise OutOfDeviceMemory(str(e)) from e


def current_stream(device: Device, kind: str | None) -> int:
    """The handle of the stream that the array's library uses now: torch's for torch, else CuPy's."""
    if kind == "torch" and (torch := torch_module()) is not None:
        return int(torch.cuda.current_stream(device.index).cuda_stream)
    cupy = cupy_module()
    return int(cupy.cuda.get_current_stream().ptr) if cupy is not None else 0
