"""Real and emulated devices as those of one backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import EMULATED, ArrayInfo, Device, Runtime
from kernelseam.dtypes import DType

from kernelseam_rocm.emulator import Emulator


class JoinedRuntime:
    """The real devices, if any, and after them the emulated ones."""

    def __init__(self, real: Runtime, emulator: Emulator) -> None:
        self._real, self._emulator = real, emulator
        self._runtime: Runtime | None = None

    def _emulated(self) -> Runtime:
        if self._runtime is None:  # how many real devices there are is known once HIP is loaded
            self._runtime = self._emulator.runtime(len(self._real.devices()))
        return self._runtime

    def _of(self, device: Device) -> Runtime:
        return self._emulated() if device.evidence == EMULATED else self._real

    def devices(self) -> Sequence[Device]:
        return (*self._real.devices(), *self._emulated().devices())

    def describe(self, array: object) -> ArrayInfo | None:
        return self._emulated().describe(array) or self._real.describe(array)

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        return self._of(device).empty(shape, dtype, device, like)

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        return self._of(device).from_host(host, device)

    def to_host(self, array: object) -> npt.NDArray[Any]:
        emulated = self._emulated()
        return (emulated if emulated.describe(array) else self._real).to_host(array)

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        return self._of(device).read(pointer, size, device)

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return self._of(device).current_stream(device, array)

    def synchronize(self, device: Device) -> None:
        self._of(device).synchronize(device)

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        return self._of(device).prepare_memset(pointer, value, size, device)

    def activate(self, device: Device) -> AbstractContextManager[None]:
        return self._of(device).activate(device)

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        return self._of(device).time(launch, device, repeats)
