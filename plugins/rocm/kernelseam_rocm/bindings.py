"""hip-python, in either of its layouts, with every call's status checked."""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from typing import Any

from kernelseam.errors import DeviceError, NoDevice, OutOfDeviceMemory

from kernelseam_rocm import worker

LAYOUTS = ("rocm.bindings", "hip")
"""hip-python 10 puts its modules under the first, 7.2 under the second."""

INSTALL = {
    **dict.fromkeys(("hip", "hiprtc"), "install hip-python"),
    "hipblas": "install kernelseam-rocm[blas]",
}
"""By module, the distribution that has it."""

DRIVERS = ("/dev/kfd", "/dev/dxg")
"""The driver's device files: on Linux, and in the Windows Subsystem for Linux."""

OUT_OF_MEMORY, NO_DEVICE = 2, 100  # hipErrorOutOfMemory, hipErrorNoDevice


@cache
def module(name: str) -> Any:
    """hip-python's module of that name: "hip", "hiprtc" or "hipblas". Loads no library of the
    vendor yet.

    Raises NoDevice, saying what was tried, where it cannot be imported.
    """
    failures = []
    for layout in LAYOUTS:
        try:
            return importlib.import_module(f"{layout}.{name}")
        except ImportError as e:
            failures.append(f"{layout}.{name}: {e}")
    raise NoDevice(f"{name} cannot be imported ({'; '.join(failures)}): {INSTALL[name]}")


@cache
def hip() -> Any:
    """The module of the HIP runtime, with the compile server started before it.

    Forking is only safe before the runtime starts its threads. Raises NoDevice where there is no
    driver: the runtime is then not called, as that of ROCm 6.4, called from two threads on such a
    machine, crashes the process at its exit.
    """
    runtime = module("hip")
    if not any(os.path.exists(path) for path in DRIVERS):
        raise NoDevice(f"no AMD GPU driver is here: neither {' nor '.join(DRIVERS)} exists")
    worker.server().start()
    return runtime


def call(name: str, *arguments: object) -> Any:
    """One call of the HIP runtime: its results without the status, a single one without its tuple.

    Raises NoDevice where the library cannot be loaded or sees no device, OutOfDeviceMemory, else
    DeviceError, each with the call's name, the code and its meaning.
    """
    runtime = hip()
    try:
        status, *results = getattr(runtime, name)(*arguments)
    except RuntimeError as e:  # hip-python could not find the library, or the function in it
        raise NoDevice(f"{name} cannot be called: {said(e)}") from e
    if int(status):
        raise failure(name, status)
    return results[0] if len(results) == 1 else tuple(results)


def said(e: Exception) -> str:
    """What an exception says; hip-python puts bytes into its text as Python prints them."""
    return re.sub(r"'?\bb'([^']*)''?", r"\1", str(e))


def failure(name: str, status: Any) -> DeviceError:
    """The error for a status that is not success."""
    code = int(status)
    kinds: dict[int, type[DeviceError]] = {OUT_OF_MEMORY: OutOfDeviceMemory, NO_DEVICE: NoDevice}
    meaning = text(hip().hipGetErrorString(status))
    return kinds.get(code, DeviceError)(
        f"{name} failed with {getattr(status, 'name', 'status')} ({code}): {meaning}"
    )


def properties(index: int) -> Any:
    """The device's hipDeviceProp_t."""
    runtime = hip()
    if runtime.__name__.startswith("rocm."):
        return call("hipGetDeviceProperties", index)
    structure = runtime.hipDeviceProp_t()  # 7.2 fills in a structure of the caller's
    call("hipGetDeviceProperties", structure, index)
    return structure


def text(value: Any) -> str:
    """A C string as hip-python returns it: bytes, str, or (10) behind a status."""
    if isinstance(value, tuple):
        value = value[-1]
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
