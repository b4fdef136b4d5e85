"""Devices and arrays: host memory under another name, so that only this backend takes it for its
own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import ArrayInfo, Device, DeviceLimits
from kernelseam.dtypes import DType
from kernelseam.errors import OutOfDeviceMemory
from kernelseam.reference.runtime import HostRuntime

from kernelseam_hostcpp.archs import ROWS

_LIMITS = DeviceLimits(
    compute_units=3,  # few blocks, so that each takes several tiles
    shared_bytes_per_block=1 << 20,
    bytes_per_second=1e9,
    operations_per_second={d.value: 1e9 for d in DType},
    launch_seconds=1e-3,
)
DEVICES = tuple(
    Device("hostcpp", i, arch, f"C++ on {os.uname().machine}", _LIMITS, "host")
    for i, arch in enumerate(ROWS)
)


class HostArray:
    """A NumPy array that belongs to a device of this backend."""

    def __init__(self, host: npt.NDArray[Any], index: int = 0) -> None:
        self.host, self.index = host, index

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, "version": 3, "hostcpp": self.index}


class _Seen:
    """Memory as an array interface tells of it."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class HostCppRuntime:
    """contract.Runtime over host memory, by the reference's."""

    def __init__(self) -> None:
        self._host = HostRuntime()

    def devices(self) -> Sequence[Device]:
        return DEVICES

    def describe(self, array: object) -> ArrayInfo | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if not isinstance(interface, dict) or "hostcpp" not in interface:
            return None
        info = self._host.describe(_host_view(array, interface))
        assert info is not None
        return dataclasses.replace(
            info, device=DEVICES[interface["hostcpp"]], kind="hostcpp", owner=array
        )

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        try:
            return HostArray(np.full(tuple(shape), np.nan, dtype.numpy), device.index)
        except MemoryError as e:
            raise OutOfDeviceMemory(
                f"allocating {list(shape)} of {dtype} on {device} failed: {e}"
            ) from e

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        return HostArray(np.array(host, order="C"), device.index)

    def to_host(self, array: object) -> npt.NDArray[Any]:
        interface: dict[str, Any] = array.__cuda_array_interface__  # type: ignore[attr-defined]
        return np.array(_host_view(array, interface), order="C")

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        return self._host.read(pointer, size, device)

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return 0

    def synchronize(self, device: Device) -> None:
        """A launch has ended when it returns."""

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        return self._host.prepare_memset(pointer, value, size, device)

    def activate(self, device: Device) -> AbstractContextManager[None]:
        return self._host.activate(device)

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        return self._host.time(launch, device, repeats)


def _host_view(array: object, interface: dict[str, Any]) -> npt.NDArray[Any]:
    return array.host if isinstance(array, HostArray) else np.asarray(_Seen(interface))
