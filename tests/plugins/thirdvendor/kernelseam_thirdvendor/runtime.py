"""Devices, arrays and streams of Acme, all of them in host memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import ArrayInfo, Device, DeviceLimits
from kernelseam.dtypes import DType

DEVICES = tuple(
    Device("acme", i, "acme1", "Acme One", DeviceLimits(launch_seconds=1e-6)) for i in range(2)
)


class AcmeArray:
    """A vendor's array: a NumPy array that only its own runtime recognises."""

    def __init__(self, host: npt.NDArray[Any], index: int = 0) -> None:
        self.host, self.index = host, index

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, "version": 3, "acme": self.index}


class _Host:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


class AcmeRuntime:
    """contract.Runtime. ``current`` is the current device, ``stream`` the current stream of every
    library.

    ``asked`` is the array by which the library was last told.
    """

    def __init__(self) -> None:
        self.current, self.stream = 0, 7
        self.asked: ArrayInfo | None = None

    def devices(self) -> Sequence[Device]:
        return DEVICES

    def describe(self, array: object) -> ArrayInfo | None:
        interface = getattr(array, "__cuda_array_interface__", None)
        if not isinstance(interface, dict) or "acme" not in interface:
            return None
        host = array.host if isinstance(array, AcmeArray) else np.asarray(_Host(interface))
        size = host.itemsize
        return ArrayInfo(
            host.ctypes.data,
            host.shape,
            tuple(s // size for s in host.strides),
            DType.of(host.dtype, floating=False),
            DEVICES[interface["acme"]],
            "acme",
            array,
            host.flags.writeable,
        )

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        return AcmeArray(np.empty(tuple(shape), dtype.numpy), device.index)

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        return AcmeArray(np.array(host, order="C"), device.index)

    def to_host(self, array: object) -> npt.NDArray[Any]:
        if isinstance(array, AcmeArray):
            return np.ascontiguousarray(array.host).copy()
        interface: dict[str, Any] = array.__cuda_array_interface__  # type: ignore[attr-defined]
        return np.ascontiguousarray(np.asarray(_Host(interface))).copy()

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytearray(ctypes.string_at(pointer, size)), np.uint8)

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        self.asked = array
        return self.stream

    def synchronize(self, device: Device) -> None:
        """Nothing is ever queued."""

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            ctypes.memset(pointer, value, size)

        return launch

    @contextmanager
    def activate(self, device: Device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            launch(self.stream)
            seconds.append(time.perf_counter() - start)
        return seconds
