"""The host as a device: NumPy arrays, torch's CPU tensors, and other CPU memory by DLPack."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import ArrayInfo, Device, DeviceLimits, host_array
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, OutOfDeviceMemory, UnknownName
from kernelseam.frozen import dataclass

_DLPACK_CPU = 1
_NOTHING = nullcontext()
_dtypes: dict[np.dtype[Any], DType] = {}


@dataclass(frozen=True)
class _Borrowed(ArrayInfo):
    """A view obtained through NumPy, which must live as long as its address is used."""

    view: object = None


def host_device() -> Device:
    """The host. Rates are rough, for predictions: BLAS on 256-bit vectors, memory at 10 GB/s a
    core."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    single = 5e10 * cores
    limits = DeviceLimits(
        compute_units=cores,
        memory_bytes=_memory_bytes(),
        bytes_per_second=1e10 * cores,
        operations_per_second={
            "float16": single,
            "bfloat16": single,
            "float32": single,
            "float64": single / 2,
        },
        launch_seconds=2e-5,
    )
    return Device("numpy", 0, "cpu", platform.processor() or platform.machine(), limits, "host")


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


class HostRuntime:
    """contract.Runtime over host memory. There is one stream, 0, and all work is done when a call
    returns."""

    def __init__(self) -> None:
        self.device = host_device()

    def versions(self) -> dict[str, str]:
        """Versions on which measured times depend."""
        return {"numpy": np.__version__}

    def devices(self) -> Sequence[Device]:
        return (self.device,)

    def describe(self, array: object) -> ArrayInfo | None:
        if type(array) is np.ndarray:
            return self._numpy(array, "numpy", array)
        if torch_arrays.is_tensor(array):
            return torch_arrays.describe(array, self.device) if array.device.type == "cpu" else None  # type: ignore[attr-defined]
        if isinstance(array, np.ndarray):
            return (
                None if isinstance(array, np.ma.MaskedArray) else self._numpy(array, "numpy", array)
            )
        return self._by_dlpack(array)

    def _numpy(self, array: npt.NDArray[Any], kind: str, owner: object) -> ArrayInfo:
        dtype = _dtypes.get(array.dtype) or _native(array.dtype)
        size = array.dtype.itemsize
        strides = array.strides
        if any(s % size for s in strides):
            raise UnknownName(
                "strides",
                strides,
                f"must be multiples of the {size}-byte element",
                "Copy the field into an array of its own",
            )
        flags = array.flags
        make, more = (ArrayInfo, ()) if owner is array else (_Borrowed, (array,))
        return make(
            array.ctypes.data,
            array.shape,
            tuple([s // size for s in strides]),
            dtype,
            self.device,
            kind,
            owner,
            flags.writeable,
            *more,
        )

    def _by_dlpack(self, array: Any) -> ArrayInfo | None:
        where = getattr(array, "__dlpack_device__", None)
        if where is None or int(where()[0]) != _DLPACK_CPU:
            return None
        try:
            view = np.from_dlpack(array)
        # NumPy does not read bfloat16 by DLPack
        except (BufferError, RuntimeError, TypeError) as e:
            try:
                view = np.asarray(array).view()
            except (TypeError, ValueError, RuntimeError):
                view = np.empty(0, object)
            if view.dtype.hasobject:
                if isinstance(e, BufferError):
                    raise InvalidValue(
                        "__dlpack__",
                        f"BufferError on the host: {e}",
                        "its library does not export it",
                        "Pass a copy that it exports, or a NumPy array",
                    ) from None
                return None
            view.flags.writeable = False  # it may be a copy
        return self._numpy(view, type(array).__module__.partition(".")[0], array)

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        if like is not None and like.kind == "torch":
            return torch_arrays.empty(shape, dtype, "cpu")
        try:
            return np.empty(tuple(shape), dtype.numpy)
        except MemoryError as e:
            raise OutOfDeviceMemory(
                f"allocating {list(shape)} of {dtype} on {device} failed: {e}"
            ) from e

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        return np.array(host, order="C")

    def to_host(self, array: object) -> npt.NDArray[Any]:
        if isinstance(array, np.ndarray):
            return np.array(array, order="C")
        info = self.describe(array)
        if info is None:
            raise UnknownName(
                "array",
                type(array).__name__,
                "must lie in host memory",
                "Ask the runtime of its device",
            )
        return np.array(host_array(info.pointer, info.shape, info.strides, info.dtype), order="C")

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        content = np.empty(size, np.uint8)  # string_at counts in 32 bits
        ctypes.memmove(content.ctypes.data, pointer, size)
        return content

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return 0

    def synchronize(self, device: Device) -> None:
        """Nothing is ever queued."""

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            ctypes.memset(pointer, value, size)

        return launch

    def activate(self, device: Device) -> AbstractContextManager[None]:
        return _NOTHING

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            launch(0)
            seconds.append(time.perf_counter() - start)
        return seconds


def _native(dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise UnknownName(
            "dtype",
            dtype.str,
            "must be in the machine's byte order",
            "Convert with array.astype(array.dtype.newbyteorder('='))",
        )
    return _dtypes.setdefault(dtype, DType.of(dtype, floating=False))
