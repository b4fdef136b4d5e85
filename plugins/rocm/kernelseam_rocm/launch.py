"""Launches: arguments are packed here and passed to the runtime as one buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

from kernelseam.contract import KernelFacts, LaunchConfig
from kernelseam.errors import InvalidValue

from kernelseam_rocm import bindings

# HIP_LAUNCH_PARAM_BUFFER_POINTER, …_BUFFER_SIZE, …_END
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3


def check_arguments(arguments: bytes, facts: KernelFacts) -> int:
    """The size of the kernel's arguments. Raises InvalidValue where the packed ones are not of that
    size."""
    expected = max((offset + size for offset, size in facts.parameters), default=0)
    if len(arguments) != expected:
        raise InvalidValue(
            "arguments",
            f"{len(arguments)} bytes",
            f"kernel {facts.name} takes {expected}",
            "Pack them by the kernel's signature",
        )
    return expected


def driver_facts(function: object, read: KernelFacts) -> KernelFacts:
    """What the runtime says of a function; HIP does not report the parameters: they are those
    read from the binary."""
    attributes = bindings.hip().hipFunction_attribute

    def attribute(name: str) -> int:
        return int(
            bindings.call(
                "hipFuncGetAttribute", getattr(attributes, f"HIP_FUNC_ATTRIBUTE_{name}"), function
            )
        )

    return replace(
        read,
        registers=attribute("NUM_REGS"),
        scratch_bytes=attribute("LOCAL_SIZE_BYTES"),
        shared_bytes=attribute("SHARED_SIZE_BYTES"),
    )


class HipKernel:
    """kernelseam.contract.LoadedKernel: a function of a loaded module."""

    def __init__(self, function: object, facts: KernelFacts) -> None:
        self._function = function
        self.facts = facts

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        """See the contract. Raises InvalidValue where the arguments' size is not the kernel's: the
        runtime would read beyond them silently."""
        config.require_plain("rocm")
        expected = check_arguments(arguments, self.facts)
        # hip-python's own packing of a tuple mistakes the alignment of structures; an address it
        # passes on as it is.
        buffer = ctypes.create_string_buffer(arguments, max(expected, 1))
        size = ctypes.c_size_t(expected)
        addresses = ctypes.addressof(buffer), ctypes.addressof(size)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, addresses[0], _BUFFER_SIZE, addresses[1], _END
        )
        keep_alive, address = (buffer, size, extra), ctypes.addressof(extra)
        start, function = bindings.hip().hipModuleLaunchKernel, self._function
        grid, block, shared_bytes = config.grid, config.block, config.shared_bytes

        def launch(stream: int, keep_alive: object = keep_alive) -> None:
            (status,) = start(function, *grid, *block, shared_bytes, stream, None, address)
            if status.value:
                raise bindings.failure(f"hipModuleLaunchKernel ({config})", status)

        return launch
