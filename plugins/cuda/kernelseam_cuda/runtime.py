"""The CUDA runtime behind the contract: devices, memory, streams and arrays, through CuPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import ArrayInfo, Device, DeviceLimits
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue, OutOfDeviceMemory
from kernelseam_cuda import archs, arrays, bindings


class CudaRuntime:
    """kernelseam.contract.Runtime over CuPy. Without a device ``devices`` is empty and ``describe`` knows nothing."""

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None
        self.absence = ""
        """Why there is no device; "" where there is one, or nobody has looked."""

    def devices(self) -> Sequence[Device]:
        if self._devices is None:
            try:
                bindings.call("cuInit", 0)
                count = bindings.call("cuDeviceGetCount")
                self._devices = tuple(_device(i) for i in range(count))
            except DeviceError as e:
                self._devices, self.absence = (), str(e)
        return self._devices

    def describe(self, array: object) -> ArrayInfo | None:
        return arrays.describe(array, self._devices if self._devices is not None else self.devices())

    def empty(self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None) -> object:
        with self.activate(device):
            return arrays.empty(shape, dtype, device, like.kind if like else None)

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        contiguous = np.ascontiguousarray(host).reshape(host.shape)
        with self.activate(device):
            if host.dtype.name == DType.bfloat16.value:
                array = arrays.DeviceArray(host.shape, DType.bfloat16, device)
                if contiguous.nbytes:
                    array.memory.copy_from_host(contiguous.ctypes.data, contiguous.nbytes)
                return array
            cupy = bindings.cupy()
            try:
                made = cupy.asarray(contiguous)
            except cupy.cuda.memory.OutOfMemoryError as e:
                raise OutOfDeviceMemory(str(e)) from e
            cupy.cuda.get_current_stream().synchronize()
            return made

    def to_host(self, array: object) -> npt.NDArray[Any]:
        info = self.describe(array)
        if info is None:
            raise InvalidValue("array", type(array).__name__, "must lie on a device of backend cuda", "Move it there")
        dtype = np.dtype(info.dtype.numpy)
        if 0 in info.shape:
            return np.empty(info.shape, dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(info.shape, info.strides, strict=True))
        flat = np.empty(span, dtype)
        cupy = bindings.cupy()
        with self.activate(info.device):
            cupy.cuda.runtime.deviceSynchronize()
            cupy.cuda.runtime.memcpy(flat.ctypes.data, info.pointer, flat.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
        view = np.lib.stride_tricks.as_strided(flat, info.shape, tuple(s * dtype.itemsize for s in info.strides))
        return np.ascontiguousarray(view).reshape(info.shape)

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return arrays.current_stream(device, array.kind if array else None)

    def synchronize(self, device: Device) -> None:
        with self.activate(device):
            bindings.cupy().cuda.runtime.deviceSynchronize()

    def activate(self, device: Device) -> AbstractContextManager[None]:
        return _Activated(device.index)

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        cupy = bindings.cupy()
        seconds: list[float] = []
        with self.activate(device), cupy.cuda.Stream(non_blocking=True) as stream:
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            for _ in range(repeats):
                start.record(stream)
                launch(stream.ptr)
                stop.record(stream)
                stop.synchronize()
                seconds.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
        return seconds


class _Activated:
    """Makes a device current, and the one before current again. Where it already is, this costs one query.

    A thread that has not used the device yet has no context: choosing the device gives it one.
    """

    __slots__ = ("_before", "_index")
    _seen = threading.local()

    def __init__(self, index: int) -> None:
        self._index = index
        self._before = index

    def __enter__(self) -> None:
        runtime = bindings.cupy().cuda.runtime
        self._before = runtime.getDevice()
        if self._before != self._index or self._index not in self._seen.__dict__.setdefault("devices", set()):
            runtime.setDevice(self._index)
            self._seen.devices.add(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._index:
            bindings.cupy().cuda.runtime.setDevice(self._before)


def _device(index: int) -> Device:
    handle = bindings.call("cuDeviceGet", index)
    names = bindings.driver().CUdevice_attribute

    def attribute(name: str) -> int:
        return int(bindings.call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))

    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    arch = archs.BY_CAPABILITY.get(capability, f"sm_{capability[0]}{capability[1]}")
    units, clock = attribute("MULTIPROCESSOR_COUNT"), attribute("CLOCK_RATE") * 1e3
    name = bindings.call("cuDeviceGetName", 256, handle)
    limits = DeviceLimits(
        compute_units=units,
        shared_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bytes=int(bindings.call("cuDeviceTotalMem", handle)),
        # Two transfers a clock over the bus; the clock is in kHz, the width in bits.
        bytes_per_second=2 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
        or DeviceLimits.bytes_per_second,
        operations_per_second={d.value: n * units * clock for d, n in archs.RATES.get(arch, {}).items()},
    )
    return Device("cuda", index, arch, name.partition(b"\0")[0].decode(), limits)
