"""The HIP runtime behind the contract: devices, memory, streams and arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import ArrayInfo, CallState, Device, DeviceLimits, host_copy
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue
from kernelseam.forking import new_lock

from kernelseam_rocm import archs, arrays, bindings

_NOTHING = nullcontext()
_STAGED = 1 << 22
"""Bytes of pinned memory: half a million addresses of a list."""
_PORTABLE = 1  # hipHostMallocPortable: pinned for all devices


class HipRuntime:
    """kernelseam.contract.Runtime over hip-python. Where there is no device every call raises
    NoDevice, but ``devices`` and ``describe``, which find none."""

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None
        self._pinned = _Pinned()
        self.absence = ""
        """Why there is no device; "" where there is one, or before ``devices`` is called."""

    def devices(self) -> Sequence[Device]:
        if self._devices is None:
            try:
                self._devices = tuple(_device(i) for i in range(bindings.call("hipGetDeviceCount")))
            except DeviceError as e:
                self._devices, self.absence = (), str(e)
        return self._devices

    def describe(self, array: object) -> ArrayInfo | None:
        return arrays.describe(
            array, self._devices if self._devices is not None else self.devices()
        )

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        with self.activate(device):
            return arrays.empty(shape, dtype, device, like.kind if like else None)

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        contiguous = np.ascontiguousarray(host)
        with self.activate(device):
            array = arrays.DeviceArray(host.shape, DType.of(host.dtype, floating=False), device)
            self._pinned.copy(contiguous, array.pointer)
        return array

    def to_host(self, array: object) -> npt.NDArray[Any]:
        info = self.describe(array)
        if info is None:
            raise InvalidValue(
                "array",
                type(array).__name__,
                "must lie on a device of backend rocm",
                "Move it there",
            )
        return host_copy(info, self)

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        content = np.empty(size, np.uint8)
        with self.activate(device):
            bindings.call("hipDeviceSynchronize")
            kind = bindings.hip().hipMemcpyKind.hipMemcpyDeviceToHost
            bindings.call("hipMemcpy", content.ctypes.data, pointer, size, kind)
        return content

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return arrays.current_stream(device, array.kind if array else None)

    def synchronize(self, device: Device) -> None:
        with self.activate(device):
            bindings.call("hipDeviceSynchronize")

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        start = bindings.hip().hipMemsetAsync

        def launch(stream: int) -> None:
            (status,) = start(pointer, value, size, stream)
            if status.value:
                raise bindings.failure(f"hipMemsetAsync of {size} bytes at {pointer:#x}", status)

        return launch

    def versions(self) -> dict[str, str]:
        """Versions that affect timings, the compiler aside: the driver and the runtime, whose
        libraries have its version."""
        return {
            n: str(bindings.call(f"hip{n.capitalize()}GetVersion")) for n in ("driver", "runtime")
        }

    def activate(self, device: Device) -> AbstractContextManager[None]:
        previous = bindings.call("hipGetDevice")
        return _NOTHING if previous == device.index else _activated(device.index, previous)

    def call_state(self, device: Device, kind: str | None) -> CallState:
        index = device.index

        def is_current() -> bool:
            return bool(bindings.call("hipGetDevice") == index)

        return CallState(is_current, arrays.stream_getter(device, kind))

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        with self.activate(device), _events(2 * repeats) as events:
            stream = self.current_stream(device)
            for i in range(repeats):
                bindings.call("hipEventRecord", events[2 * i], stream)
                launch(stream)
                bindings.call("hipEventRecord", events[2 * i + 1], stream)
            bindings.call("hipDeviceSynchronize")
            return [
                bindings.call("hipEventElapsedTime", events[2 * i], events[2 * i + 1]) * 1e-3
                for i in range(repeats)
            ]


class _Pinned:
    """Pinned host memory through which copies to devices are staged. It is allocated at the first
    copy and kept: freeing it waits for the device."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._memory: Any = None

    def copy(self, host: npt.NDArray[Any], pointer: int) -> None:
        """Copy a contiguous host array to device memory; done when this returns."""
        with self._lock:
            for at in range(0, host.nbytes, _STAGED):
                if self._memory is None:
                    self._memory = bindings.call("hipHostMalloc", _STAGED, _PORTABLE)
                size = min(_STAGED, host.nbytes - at)
                ctypes.memmove(int(self._memory), host.ctypes.data + at, size)
                kind = bindings.hip().hipMemcpyKind.hipMemcpyHostToDevice
                bindings.call("hipMemcpy", pointer + at, int(self._memory), size, kind)


@contextmanager
def _activated(index: int, previous: int) -> Iterator[None]:
    bindings.call("hipSetDevice", index)
    try:
        yield
    finally:
        bindings.call("hipSetDevice", previous)


@contextmanager
def _events(count: int) -> Iterator[list[object]]:
    events: list[object] = []
    try:
        events += [bindings.call("hipEventCreate") for _ in range(count)]
        yield events
    finally:
        for event in events:
            bindings.hip().hipEventDestroy(event)


def _device(index: int) -> Device:
    p = bindings.properties(index)
    arch = bindings.text(p.gcnArchName).partition(":")[0]
    clock = p.clockRate * 1e3
    rates = archs.RATES.get(arch, {})
    limits = DeviceLimits(
        compute_units=p.multiProcessorCount,
        shared_bytes_per_block=p.sharedMemPerBlock,
        memory_bytes=p.totalGlobalMem,
        # Two transfers a clock over the bus; the clock is in kHz, the width in bits.
        bytes_per_second=2 * p.memoryClockRate * 1e3 * p.memoryBusWidth / 8
        or DeviceLimits.bytes_per_second,
        operations_per_second={
            d.value: n * p.multiProcessorCount * clock for d, n in rates.items()
        },
    )
    return Device("rocm", index, arch, bindings.text(p.name), limits)
