"""Launching: arguments packed by us, handed to the runtime as one buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kernelseam.contract import KernelFacts
from kernelseam.errors import InvalidValue
from kernelseam_rocm import bindings

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3  # HIP_LAUNCH_PARAM_BUFFER_POINTER, …_BUFFER_SIZE, …_END


def check_arguments(arguments: bytes, facts: KernelFacts) -> int:
    """The size of the kernel's arguments. Raises InvalidValue where the packed ones are not of that size."""
    want = max((offset + size for offset, size in facts.parameters), default=0)
    if len(arguments) != want:
        raise InvalidValue(
            "arguments", f"{len(arguments)} bytes", f"kernel {facts.name} takes {want}",
            "Pack them by the kernel's signature",
        )
    return want


class HipKernel:
    """kernelseam.contract.LoadedKernel: a function of a loaded module."""

    def __init__(self, function: object, facts: KernelFacts) -> None:
        self._function = function
        self.facts = facts

    def prepare(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, arguments: bytes
    ) -> Callable[[int], None]:
        """See the contract. Raises InvalidValue where the arguments' size is not the kernel's: the runtime would read
        beyond them without a word."""
        want = check_arguments(arguments, self.facts)
        # hip-python's own packing of a tuple mistakes the alignment of structures; an address it passes on as it is.
        buffer = ctypes.create_string_buffer(arguments, max(want, 1))
        size = ctypes.c_size_t(want)
        places = ctypes.addressof(buffer), ctypes.addressof(size)
        extra = (ctypes.c_void_p * 5)(_BUFFER_POINTER, places[0], _BUFFER_SIZE, places[1], _END)
        keep, address = (buffer, size, extra), ctypes.addressof(extra)
        start, function = bindings.hip().hipModuleLaunchKernel, self._function

        def launch(stream: int, keep: object = keep) -> None:
            (status,) = start(function, *grid, *block, shared_bytes, stream, None, address)
            if status.value:
                what = f"hipModuleLaunchKernel (grid {grid}, block {block}, {shared_bytes} bytes shared)"
                raise bindings.failure(what, status)

        return launch
