"""Kernels on a device: arguments packed once, launches that do nothing but launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from kernelseam.errors import DeviceError
from kernelseam_cuda import bindings

_WITHOUT_OPT_IN = 48 * 1024
"""Shared memory a block gets without asking for more."""


def parameter_array(arguments: bytes, parameters: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    """The packed arguments in memory of their own, and the array of addresses that cuLaunchKernel reads."""
    end = max((offset + size for offset, size in parameters), default=0)
    if len(arguments) != end:
        raise DeviceError(f"{len(arguments)} bytes of arguments were packed, the kernel takes {end}")
    buffer = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
    base = ctypes.addressof(buffer)
    return buffer, (ctypes.c_void_p * max(len(parameters), 1))(*(base + offset for offset, _ in parameters))


class CudaKernel:
    """kernelseam.contract.LoadedKernel over a CUfunction."""

    def __init__(self, function: Any, parameters: Sequence[tuple[int, int]]) -> None:
        self._function, self._parameters = function, tuple(parameters)
        self._opted_in = _WITHOUT_OPT_IN

    def prepare(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, arguments: bytes
    ) -> Callable[[int], None]:
        if shared_bytes > self._opted_in:
            which = bindings.driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            bindings.call("cuFuncSetAttribute", self._function, which, shared_bytes)
            self._opted_in = shared_bytes
        buffer, addresses = parameter_array(arguments, self._parameters)
        run, function, array = bindings.driver().cuLaunchKernel, self._function, ctypes.addressof(addresses)

        def launch(stream: int, keep: object = (buffer, addresses)) -> None:
            (status,) = run(function, *grid, *block, shared_bytes, stream, array, 0)
            if status:
                bindings.fail("cuLaunchKernel", status, f"grid {grid}, block {block}, {shared_bytes} bytes shared")

        return launch
