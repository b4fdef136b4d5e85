"""Arrays on AMD GPUs, of every library that is loaded, told apart by attributes: no library is
imported to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Device
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, OutOfDeviceMemory

from kernelseam_rocm import bindings, dlpack


class DeviceArray:
    """Row-major device memory of our own, freed with the object. Other libraries take it through
    DLPack."""

    def __init__(self, shape: Sequence[int], dtype: DType, device: Device) -> None:
        """Allocate on the current device. Raises OutOfDeviceMemory."""
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.nbytes = dtype.itemsize
        for n in self.shape:
            self.nbytes *= n
        self._memory = bindings.call("hipMalloc", self.nbytes) if self.nbytes else None
        self.pointer = int(self._memory) if self._memory is not None else 0

    def __del__(self) -> None:
        # Freeing waits for what still uses the memory. At interpreter exit the bindings may be
        # gone: so is the memory.
        if getattr(self, "pointer", 0) and bindings is not None and not sys.is_finalizing():
            bindings.hip().hipFree(self._memory)

    def __dlpack__(self, *, stream: object = None, **options: object) -> Any:
        return dlpack.write(self.pointer, self.shape, self.dtype, self.device.index, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.ROCM, self.device.index

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def torch_module() -> Any | None:
    """torch if it is loaded and built for ROCm."""
    torch = sys.modules.get("torch")
    return torch if getattr(getattr(torch, "version", None), "hip", None) else None


def cupy_module() -> Any | None:
    """cupy if it is loaded and built for ROCm."""
    cupy = sys.modules.get("cupy")
    runtime = getattr(getattr(cupy, "cuda", None), "runtime", None)
    return cupy if getattr(runtime, "is_hip", False) else None


def describe(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """The array's view, or None if it is not on one of the devices. Raises UnknownName for other
    element types."""
    if isinstance(array, DeviceArray):
        strides = dlpack.row_major(array.shape)
        return ArrayInfo(
            array.pointer, array.shape, strides, array.dtype, array.device, "kernelseam", array
        )
    if not devices:
        return None
    if torch_arrays.is_tensor(array):
        on_gpu = torch_module() is not None and array.device.type == "cuda"
        return torch_arrays.describe(array, devices[array.get_device()]) if on_gpu else None
    if (cupy := cupy_module()) is not None and isinstance(array, cupy.ndarray):
        dtype = DType.of(array.dtype.name, floating=False)
        strides = tuple(s // dtype.itemsize for s in array.strides)
        return ArrayInfo(
            array.data.ptr,
            tuple(array.shape),
            strides,
            dtype,
            devices[array.device.id],
            "cupy",
            array,
        )
    return _stranger(array, devices)


def _stranger(array: Any, devices: Sequence[Device]) -> ArrayInfo | None:
    """An array of a library that we do not know, through DLPack."""
    where = getattr(type(array), "__dlpack_device__", None)
    if where is None or int((place := where(array))[0]) != dlpack.ROCM:
        return None
    view = dlpack.read(array.__dlpack__())
    kind = type(array).__module__.partition(".")[0]
    dtype = DType.of(view.dtype, floating=False)
    return ArrayInfo(
        view.pointer, view.shape, view.strides, dtype, devices[int(place[1])], kind, array
    )


def empty(shape: Sequence[int], dtype: DType, device: Device, kind: str | None) -> object:
    """A new row-major array on the current device, of that kind where we can make it, else a
    DeviceArray.

    Raises OutOfDeviceMemory, DeviceError.
    """
    try:
        if kind == "torch" and torch_module() is not None:
            return torch_arrays.empty(shape, dtype, f"cuda:{device.index}")
        if kind == "cupy" and (cupy := cupy_module()) is not None:
            return cupy.empty(tuple(shape), dtype=dtype.numpy)
    except DeviceError:
        raise
    # a context that is lost has its libraries raise errors of their own
    except (MemoryError, RuntimeError) as e:
        # cupy's, torch's
        full = isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError"
        error = OutOfDeviceMemory if full else DeviceError
        raise error(f"allocating {list(shape)} of {dtype} on {device} failed: {e}") from e
    return DeviceArray(shape, dtype, device)


def current_stream(device: Device, kind: str | None) -> int:
    """The handle of the stream that the array's library uses now; 0, the default stream, where it
    is not known."""
    if kind == "torch" and (torch := torch_module()) is not None:
        return _torch_stream(torch, device)()
    if kind == "cupy" and (cupy := cupy_module()) is not None:
        return int(cupy.cuda.get_current_stream().ptr)
    return 0


def stream_asker(device: Device, kind: str | None) -> Callable[[], int]:
    """What asks ``current_stream`` of one device and library."""
    if kind == "torch" and (torch := torch_module()) is not None:
        return _torch_stream(torch, device)
    return partial(current_stream, device, kind)


def _torch_stream(torch: Any, device: Device) -> Callable[[], int]:
    # What torch's own compiler calls; the other is slow.
    raw = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return (
        partial(raw, device.index)
        if raw
        else lambda: int(torch.cuda.current_stream(device.index).cuda_stream)
    )
