"""Views of arrays, and a backend's runtime: devices, memory, streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kernelseam.contract.devices import Device
from kernelseam.dtypes import DType
from kernelseam.errors import copy_error


@dataclass(frozen=True, init=False)
class ArrayInfo:
    """A view of an array: address, shape, strides, dtype and device. Nothing is copied."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: DType
    device: Device
    kind: str
    """Its library: "numpy", "torch", …; results are of the same kind."""
    owner: object = field(repr=False)
    writable: bool = True

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        device: Device,
        kind: str,
        owner: object,
        writable: bool = True,
    ) -> None:
        # Every call creates one per array; the generated __init__ takes three times as long.
        put = self.__dict__
        put["pointer"], put["shape"], put["strides"], put["dtype"] = pointer, shape, strides, dtype
        put["device"], put["kind"], put["owner"], put["writable"] = device, kind, owner, writable

    def __copy__(self) -> ArrayInfo:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise copy_error("a view of an array", "Copy the array, and make a new descriptor of it")


@runtime_checkable
class Runtime(Protocol):
    """Devices, memory, streams and arrays of one backend."""

    def devices(self) -> Sequence[Device]:
        """The devices of this machine; empty, without an exception, where there are none."""

    def describe(self, array: object) -> ArrayInfo | None:
        """The array's view if the runtime knows its library and its device, else None."""

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        """A new uninitialised row-major array on the device, of ``like``'s library where given."""

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        """Copy a host array to the device; the copy is complete on return."""

    def to_host(self, array: object) -> npt.NDArray[Any]:
        """A row-major host copy of an array, after the work already queued."""

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        """A host copy of ``size`` bytes of device memory from an address, all in one allocation,
        after the work already queued."""

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        """The handle of the current stream of the array's library."""

    def synchronize(self, device: Device) -> None:
        """Wait for everything queued on the device."""

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        """``launch(stream)``, which sets ``size`` bytes of the device's memory to ``value`` (0 to
        255) on the stream, without a kernel of ours; it neither synchronises nor allocates."""

    def activate(self, device: Device) -> AbstractContextManager[None]:
        """Make the device current within the block, then restore the previous one."""

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs of ``launch(stream)``, measured on the device where
        it has a clock."""


@dataclass(frozen=True)
class CallState:
    """A runtime's per-call queries for one device and one array library."""

    is_current: Callable[[], bool]
    """Whether the device is current in this thread, so that ``activate`` is not needed."""
    current_stream: Callable[[], int]
    """The handle of the library's current stream."""


@runtime_checkable
class FastRuntime(Protocol):
    """An optional extension of Runtime: repeated calls use these queries instead of ``activate``
    and ``current_stream``."""

    def call_state(self, device: Device, kind: str | None) -> CallState:
        """The queries for a device and for arrays of a kind (``ArrayInfo.kind``; None for bare
        addresses)."""


@runtime_checkable
class GraphRuntime(Protocol):
    """An optional extension of Runtime, for devices whose launches can be captured in graphs."""

    def is_capturing(self, device: Device, stream: int | None = None) -> bool:
        """Whether a stream of the device is being captured; where None, whether the current one of
        an array library in use is."""


def host_array(
    pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: DType
) -> npt.NDArray[Any]:
    """A NumPy view of host memory; strides in elements, never negative."""
    np_dtype = np.dtype(dtype.numpy)
    if 0 in shape:
        return np.empty(tuple(shape), np_dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * (span * np_dtype.itemsize)).from_address(pointer)
    return np.ndarray(
        tuple(shape), np_dtype, memory, 0, tuple([s * np_dtype.itemsize for s in strides])
    )


def host_copy(info: ArrayInfo, runtime: Runtime) -> npt.NDArray[Any]:
    """A row-major host copy of an array in device memory, by one ``read`` of its span. Strides may
    be negative."""
    dtype = np.dtype(info.dtype.numpy)
    if 0 in info.shape:
        return np.empty(info.shape, dtype)
    ends = [(n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)]
    first, last = sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends)
    size = (last - first + 1) * dtype.itemsize
    flat = runtime.read(info.pointer + first * dtype.itemsize, size, info.device).view(dtype)
    strides = tuple(s * dtype.itemsize for s in info.strides)
    return np.array(np.lib.stride_tricks.as_strided(flat[-first:], info.shape, strides), order="C")
