"""The CUDA driver behind the contract: devices, memory, streams and arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import ArrayInfo, CallState, Device, DeviceLimits, host_copy
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue
from kernelseam.forking import new_lock

from kernelseam_cuda import archs, arrays, bindings

_NOTHING = nullcontext()
_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12")
_STAGED = 1 << 22
"""Bytes of pinned memory: half a million addresses of a list."""
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for the contexts of all devices


class CudaRuntime:
    """kernelseam.contract.Runtime over cuda-bindings and cupy. Where there is no device every call
    raises NoDevice, but ``devices`` and ``describe``, which find none."""

    def __init__(self) -> None:
        self._devices: tuple[Device, ...] | None = None
        self._current: Callable[[], tuple[Any, Any]] | None = None
        self._pinned = _Pinned()
        self.absence = ""
        """Why there is no device; "" where there is one, or before ``devices`` is called."""

    def devices(self) -> Sequence[Device]:
        if self._devices is None:
            try:
                bindings.call("cuInit", 0)
                self._devices = tuple(_device(i) for i in range(bindings.call("cuDeviceGetCount")))
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
            array = arrays.empty(host.shape, DType.of(host.dtype, floating=False), device, None)
            info = self.describe(array)
            assert info is not None
            if host.nbytes:
                # On cupy's stream: its pool hands out memory that earlier work on that stream may
                # still use.
                self._pinned.copy(contiguous, info.pointer, arrays.current_stream(device, None))
        return array

    def to_host(self, array: object) -> npt.NDArray[Any]:
        info = self.describe(array)
        if info is None:
            raise InvalidValue(
                "array",
                type(array).__name__,
                "must lie on a device of backend cuda",
                "Move it there",
            )
        return host_copy(info, self)

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        content = np.empty(size, np.uint8)
        with self.activate(device):
            bindings.call("cuCtxSynchronize")
            bindings.call("cuMemcpyDtoH", content.ctypes.data, pointer, size)
        return content

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return arrays.current_stream(device, array.kind if array else None)

    def synchronize(self, device: Device) -> None:
        with self.activate(device):
            bindings.call("cuCtxSynchronize")

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        run = bindings.driver().cuMemsetD8Async

        def launch(stream: int) -> None:
            (status,) = run(pointer, value, size, stream)
            if status:
                bindings.fail("cuMemsetD8Async", status, f"{size} bytes at {pointer:#x}")

        return launch

    def versions(self) -> dict[str, str]:
        """Versions that affect timings, the compiler aside: the driver and cuBLAS."""
        libraries = {n: version for n in _LIBRARIES if (version := bindings.version(n))}
        return {"driver": str(bindings.call("cuDriverGetVersion")), **libraries}

    def activate(self, device: Device) -> AbstractContextManager[None]:
        if self._current is None:
            # a device that another process described may be used before this process lists its own
            self.devices()
            self._current = bindings.driver().cuCtxGetCurrent
        context = int(self._current()[1])
        primary = _primary_context(device.index)
        if context == int(primary):
            return _NOTHING
        # a thread's first work: nothing to restore, and its next calls find the device current
        if not context:
            bindings.call("cuCtxSetCurrent", primary)
            return _NOTHING
        return _Activated(primary)

    def call_state(self, device: Device, kind: str | None) -> CallState:
        with self.activate(device):
            current, primary = bindings.driver().cuCtxGetCurrent, _primary_context(device.index)

        address = int(primary)

        def is_current() -> bool:
            return int(current()[1]) == address

        def is_equal() -> bool:
            """Without making an int of a context, which takes twice as long as to ask for it."""
            equal: bool = current()[1] == primary
            return equal

        # contexts of cuda-bindings before 12.9.1 are equal to themselves alone
        fast = type(primary)(address) == primary
        return CallState(is_equal if fast else is_current, arrays.stream_getter(device, kind))

    def is_capturing(self, device: Device, stream: int | None = None) -> bool:
        streams = {stream} if stream is not None else arrays.current_streams(device)
        # another status than success: the legacy stream beside a capture that it would join
        return any(
            int(status) or int(*state)
            for status, *state in map(bindings.driver().cuStreamIsCapturing, streams)
        )

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        with self.activate(device), _events(2 * repeats) as events:
            stream = self.current_stream(device)
            for i in range(repeats):
                bindings.call("cuEventRecord", events[2 * i], stream)
                launch(stream)
                bindings.call("cuEventRecord", events[2 * i + 1], stream)
            bindings.call("cuStreamSynchronize", stream)
            return [
                bindings.call("cuEventElapsedTime", events[2 * i], events[2 * i + 1]) * 1e-3
                for i in range(repeats)
            ]


class _Pinned:
    """Pinned host memory through which copies to devices are staged. It is allocated at the first
    copy and kept."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._address = 0

    def copy(self, host: npt.NDArray[Any], pointer: int, stream: int) -> None:
        """Copy a contiguous host array to device memory; done when this returns."""
        with self._lock:
            if not self._address:
                self._address = int(bindings.call("cuMemHostAlloc", _STAGED, _PORTABLE))
            for at in range(0, host.nbytes, _STAGED):
                size = min(_STAGED, host.nbytes - at)
                ctypes.memmove(self._address, host.ctypes.data + at, size)
                bindings.call("cuMemcpyHtoDAsync", pointer + at, self._address, size, stream)
                bindings.call("cuStreamSynchronize", stream)


class _Activated:
    """The device's primary context on top of the thread's stack: the one that cupy and torch
    use."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        bindings.call("cuCtxPushCurrent", self._context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        bindings.call("cuCtxPopCurrent")


@cache
def _primary_context(index: int) -> Any:
    """Retained for the life of the process, as the array libraries do."""
    return bindings.call("cuDevicePrimaryCtxRetain", bindings.call("cuDeviceGet", index))


@contextmanager
def _events(count: int) -> Iterator[list[Any]]:
    events: list[Any] = []
    try:
        events += [bindings.call("cuEventCreate", 0) for _ in range(count)]
        yield events
    finally:
        for event in events:
            bindings.driver().cuEventDestroy(event)


def capability(index: int) -> tuple[int, int]:
    """The device's compute capability."""
    return _attribute(index, "COMPUTE_CAPABILITY_MAJOR"), _attribute(
        index, "COMPUTE_CAPABILITY_MINOR"
    )


def _attribute(index: int, name: str) -> int:
    attribute = getattr(bindings.driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(
        bindings.call("cuDeviceGetAttribute", attribute, bindings.call("cuDeviceGet", index))
    )


def _device(index: int) -> Device:
    major, minor = capability(index)
    arch = archs.BY_CAPABILITY.get((major, minor), f"sm_{major}{minor}")
    handle = bindings.call("cuDeviceGet", index)
    # given in kHz
    units, clock = _attribute(index, "MULTIPROCESSOR_COUNT"), _attribute(index, "CLOCK_RATE") * 1e3
    # Two transfers a clock over the bus, whose width is given in bits.
    bandwidth = (
        2
        * _attribute(index, "MEMORY_CLOCK_RATE")
        * 1e3
        * _attribute(index, "GLOBAL_MEMORY_BUS_WIDTH")
        / 8
    )
    limits = DeviceLimits(
        compute_units=units,
        shared_bytes_per_block=_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bytes=int(bindings.call("cuDeviceTotalMem", handle)),
        bytes_per_second=bandwidth or DeviceLimits.bytes_per_second,
        operations_per_second={
            d.value: n * units * clock for d, n in archs.RATES.get(arch, {}).items()
        },
        launch_seconds=archs.LAUNCH_SECONDS,
    )
    name = bindings.call("cuDeviceGetName", 256, handle)
    return Device("cuda", index, arch, name.partition(b"\0")[0].decode(), limits)
