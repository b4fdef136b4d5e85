"""Arrays as host code sees them, and the runtime of one backend: devices, memory, streams."""

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
    """An array as host code sees it: where its first element is and how it is walked. Nothing is
    copied."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: DType
    device: Device
    kind: str
    """Who made it: "numpy", "torch", … — results are of the same kind."""
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
        # Every call makes one for each array, and what a frozen dataclass writes itself takes three
        # times as long.
        put = self.__dict__
        put["pointer"], put["shape"], put["strides"], put["dtype"] = pointer, shape, strides, dtype
        put["device"], put["kind"], put["owner"], put["writable"] = device, kind, owner, writable

    def __copy__(self) -> ArrayInfo:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise copy_error(
            "a view of an array", "Copy the array, and describe that: a descriptor is made anew"
        )


@runtime_checkable
class Runtime(Protocol):
    """Devices, memory, streams and arrays of one backend."""

    def devices(self) -> Sequence[Device]:
        """The devices that are here; empty, never an exception, where there are none."""

    def describe(self, array: object) -> ArrayInfo | None:
        """The array's view if it is of a kind and on a device that this runtime knows, else
        None."""

    def empty(
        self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None
    ) -> object:
        """A new, uninitialised, row-major array on the device; of ``like``'s kind where given."""

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        """A copy of a host array on the device, complete when this returns."""

    def to_host(self, array: object) -> npt.NDArray[Any]:
        """A host copy of an array (strides kept simple: row-major), after the work already
        queued."""

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        """A host copy of ``size`` bytes of the device's memory from an address on, after the work
        already queued."""

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        """The handle of the stream that the array's library would use now."""

    def synchronize(self, device: Device) -> None:
        """Wait for everything queued on the device."""

    def prepare_memset(
        self, pointer: int, value: int, size: int, device: Device
    ) -> Callable[[int], None]:
        """``launch(stream)``, which sets ``size`` bytes of the device's memory to ``value`` (0 to
        255) in the stream's order, without a kernel of ours; it neither waits nor allocates."""

    def activate(self, device: Device) -> AbstractContextManager[None]:
        """Make the device current, and restore the one before."""

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs of ``launch(stream)``, measured on the device where
        it has a clock."""


@dataclass(frozen=True)
class CallState:
    """What every call asks of a runtime, as closures of one device and one library of arrays."""

    is_current: Callable[[], bool]
    """Whether the device is current in this thread: then ``activate`` would do nothing."""
    current_stream: Callable[[], int]
    """The handle of the stream that the library would use now."""


@runtime_checkable
class FastRuntime(Protocol):
    """What a Runtime may have beside: calls that repeat then ask it neither for a context manager
    nor by an array."""

    def call_state(self, device: Device, kind: str | None) -> CallState:
        """Of a device, for arrays of a kind as ``ArrayInfo.kind`` names it; None where there are
        only addresses."""


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
    """A row-major host copy of an array in device memory, by one ``read`` of what it spans; strides
    of any sign."""
    dtype = np.dtype(info.dtype.numpy)
    if 0 in info.shape:
        return np.empty(info.shape, dtype)
    ends = [(n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)]
    first, last = sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends)
    size = (last - first + 1) * dtype.itemsize
    flat = runtime.read(info.pointer + first * dtype.itemsize, size, info.device).view(dtype)
    strides = tuple(s * dtype.itemsize for s in info.strides)
    return np.array(np.lib.stride_tricks.as_strided(flat[-first:], info.shape, strides), order="C")
