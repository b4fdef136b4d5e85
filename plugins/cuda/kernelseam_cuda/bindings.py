"""The one place that imports the vendor's libraries, and turns their status codes into errors."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from typing import Any, NoReturn

from kernelseam.errors import DeviceError, NoDevice, OutOfDeviceMemory

_OUT_OF_MEMORY = 2
_NO_DEVICE = (3, 34, 100, 101)
"""Not initialised, stub library, no device, invalid device."""

INSTALL = "install kernelseam-cuda[cu13] or kernelseam-cuda[cu12]"


def module(name: str) -> Any:
    """A module of CuPy or cuda.bindings. Raises NoDevice, with the remedy, where it cannot be
    imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as e:
        raise NoDevice(f"{name} cannot be imported ({e}): {INSTALL}") from e


@cache
def version(distribution: str) -> str | None:
    """That of a distribution that is installed, else None. It is a part of the key of each tuned
    choice."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def driver() -> Any:
    """cuda.bindings.driver."""
    return module("cuda.bindings.driver")


def nvrtc() -> Any:
    """cuda.bindings.nvrtc."""
    return module("cuda.bindings.nvrtc")


def cupy() -> Any:
    """cupy, built for CUDA."""
    imported = module("cupy")
    if imported.cuda.runtime.is_hip:
        raise NoDevice(f"the cupy that is installed is built for another vendor: {INSTALL}")
    return imported


def call(name: str, *arguments: object) -> Any:
    """A driver function by name; its results without the status. Raises DeviceError naming call,
    status and meaning."""
    api = driver()
    try:
        status, *results = getattr(api, name)(*arguments)
    except RuntimeError as e:  # the driver's library is missing
        raise NoDevice(f"{name} failed: {e}") from e
    if int(status):
        fail(name, status)
    return results[0] if len(results) == 1 else tuple(results)


def by_ctypes(name: str) -> Any:
    """A driver function, which returns its status as an int: it takes objects of ctypes, and ints
    of 32 bits. Raises NoDevice without a driver."""
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as e:
        raise NoDevice(f"{name} is missing: {e}") from e
    function.restype = ctypes.c_uint32
    return function


@contextmanager
def kept_from_capture() -> Iterator[None]:
    """Within it this thread may load modules and allocate while a stream is captured in a graph,
    which the driver refuses otherwise: neither becomes a part of the graph."""
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def fail(name: str, status: Any, detail: str = "") -> NoReturn:
    """Raise what a driver status means: the bindings' own, or its number, which they may have no
    name for."""
    api, number = driver(), int(status)
    called, meaning = str(number), "unknown"
    with suppress(ValueError):
        known = status if hasattr(status, "name") else api.CUresult(number)
        called = f"{known.name} ({number})"
        _, text = api.cuGetErrorString(known)
        meaning = text.decode() if isinstance(text, bytes) else meaning
    kinds = {_OUT_OF_MEMORY: OutOfDeviceMemory, **dict.fromkeys(_NO_DEVICE, NoDevice)}
    raise kinds.get(number, DeviceError)(
        f"{name} failed with {called}: {meaning}{f' ({detail})' if detail else ''}"
    )
