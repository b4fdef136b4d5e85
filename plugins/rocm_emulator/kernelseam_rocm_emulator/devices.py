"""The emulated devices, their memory and arrays."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import EMULATED, ArrayInfo, Device, DeviceLimits, host_array
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue
from kernelseam_rocm import archs
from kernelseam_rocm.dlpack import row_major

from kernelseam_rocm_emulator.memory import Arena

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1151", "gfx1200")
"""The archs that can be emulated, in the order of the devices' indices."""
UNITS = {arch: archs.PRODUCTS[arch][0][1:3] for arch in ARCHS}
"""By arch, compute units and clock in MHz of its product: from them
follows which tiles are chosen, and so they must be those of a device."""
_NOTHING = nullcontext()


def devices(first: int, memory_bytes: int) -> tuple[Device, ...]:
    """One device an arch; the first has index ``first``."""
    emulated = []
    for i, (arch, (units, megahertz)) in enumerate(UNITS.items()):
        limits = DeviceLimits(
            compute_units=units,
            shared_bytes_per_block=archs.row(arch).shared_bytes_per_block + archs.RESERVED,
            memory_bytes=memory_bytes,
            bytes_per_second=archs.PRODUCTS[arch][0][3],
            operations_per_second={
                d.value: n * units * megahertz * 1e6 for d, n in archs.RATES[arch].items()
            },
        )
        emulated.append(Device("rocm", first + i, arch, f"{arch} (emulated)", limits, EMULATED))
    return tuple(emulated)


class EmulatedArray:
    """Row-major memory of an emulated device, given back with the object."""

    def __init__(self, shape: Sequence[int], dtype: DType, device: Device, arena: Arena) -> None:
        """Raises OutOfDeviceMemory."""
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.nbytes = dtype.itemsize
        for n in self.shape:
            self.nbytes *= n
        self.pointer = arena.allocate(self.nbytes) if self.nbytes else 0
        if self.pointer:
            weakref.finalize(self, arena.release, self.pointer).atexit = False

    def host(self) -> npt.NDArray[Any]:
        """The memory itself, as the host sees it."""
        return host_array(self.pointer, self.shape, row_major(self.shape), self.dtype)

    def __repr__(self) -> str:
        return f"EmulatedArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class EmulatedRuntime:
    """kernelseam.contract.Runtime of the emulated devices. A launch is over when it returns: there
    is one stream, 0."""

    def __init__(self, arena: Arena, first: int) -> None:
        """``first``: the index of the first device."""
        self._arena = arena
        self._devices = devices(first, arena.capacity)

    def devices(self) -> Sequence[Device]:
        return self._devices

    def describe(self, array: object) -> ArrayInfo | None:
        if not isinstance(array, EmulatedArray):
            return None
        strides = row_major(array.shape)
        return ArrayInfo(
            array.pointer, array.shape, strides, array.dtype, array.device, EMULATED, array
        )

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        return EmulatedArray(shape, dtype, device, self._arena)

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        array = EmulatedArray(host.shape, DType.of(host.dtype, floating=False), device, self._arena)
        array.host()[...] = host
        return array

    def to_host(self, array: object) -> npt.NDArray[Any]:
        if not isinstance(array, EmulatedArray):
            raise InvalidValue(
                "array", type(array).__name__, "must lie on an emulated device", "Move it there"
            )
        return array.host().copy()

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        """See the contract. Raises DeviceError where that is not all in one allocation."""
        if not self._arena.holds(pointer, size):
            raise DeviceError(f"{size} bytes from {pointer:#x} on are not memory of {device}")
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
        """See the contract. Raises DeviceError where that is not all in one allocation."""
        if not self._arena.holds(pointer, size):
            raise DeviceError(f"{size} bytes from {pointer:#x} on are not memory of {device}")

        def launch(stream: int) -> None:
            ctypes.memset(pointer, value, size)

        return launch

    def activate(self, device: Device) -> AbstractContextManager[None]:
        return _NOTHING

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        """Seconds on the host's clock: how long emulation takes."""
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            launch(0)
            seconds.append(time.perf_counter() - start)
        return seconds
