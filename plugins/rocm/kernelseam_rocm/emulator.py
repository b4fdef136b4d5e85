"""The optional distribution kernelseam-rocm-emulator, imported by its name where
KERNELSEAM_TINYGRAD asks for it.

Nothing else in this plugin knows that package. Where it is absent or raises, the plugin works
without it, and `kernelseam doctor` says why.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

from kernelseam.containment import Contained, Escaped
from kernelseam.contract import KernelFacts, LoadedKernel, Runtime, Toolchain
from kernelseam.errors import NoDevice

VARIABLE = "KERNELSEAM_TINYGRAD"
"""Names a checkout of tinygrad's repository: its test tree holds the emulator of AMD's
instructions, which no package carries."""

DISTRIBUTION, PACKAGE = "kernelseam-rocm-emulator", "kernelseam_rocm_emulator"


class Emulator(Protocol):
    """What the package's ``start()`` returns, unless it is a string that says what is missing."""

    @property
    def source(self) -> str:
        """Where the emulator's code is, for `kernelseam doctor`."""
        ...

    def runtime(self, first: int) -> Runtime:
        """The runtime of the emulated devices, whose indices begin with ``first``."""
        ...

    def kernel(
        self, binary: bytes, digest: str, facts: KernelFacts, arch: str, toolchain: Toolchain
    ) -> LoadedKernel:
        """A kernel of a code object. ``digest``: of the binary. Raises DeviceError."""
        ...


@cache
def find() -> Emulator | str:
    """The process's emulator, or why there is none. Imports the package only where the variable is
    set."""
    checkout = os.environ.get(VARIABLE, "")
    try:
        with Contained(f"the package {PACKAGE}"):
            if find_spec(PACKAGE) is None:
                reason = f"{DISTRIBUTION} is not installed"
                return f"{VARIABLE} is set, but {reason}" if checkout else f"off ({reason})"
            if not checkout:
                return f"off ({VARIABLE} is not set)"
            package: Any = importlib.import_module(PACKAGE)
            started: Emulator | str = package.start()
            if not isinstance(started, str):
                started.runtime(0).devices()  # one that cannot list its devices is broken
            return started
    except Escaped as e:
        return f"{DISTRIBUTION} is broken: {e}"
    except Exception as e:
        return f"{DISTRIBUTION} is broken: {type(e).__name__}: {e}"


def required() -> Emulator:
    """The process's emulator. Raises NoDevice, saying why there is none."""
    emulator = find()
    if isinstance(emulator, str):
        raise NoDevice(f"no emulated device: {emulator}")
    return emulator
