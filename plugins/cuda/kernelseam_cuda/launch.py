"""Kernels on a device: arguments packed once, launches that do nothing but launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError
from kernelseam.forking import new_lock
from kernelseam_cuda import bindings

_WITHOUT_OPT_IN = 48 * 1024
"""Shared memory, fixed and dynamic together, that a block gets without asking for more."""
_LOADS = 12040
"""The first driver, by the CUDA it serves, that has cuFuncLoad."""

# CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE of cuda.h.
_END, _POINTER, _SIZE = 0, 1, 2


def argument_list(arguments: bytes, size: ctypes.c_size_t) -> tuple[Any, Any]:
    """The packed arguments in memory of their own, and the list that hands them to cuLaunchKernel as one buffer."""
    if len(arguments) != size.value:
        raise DeviceError(f"{len(arguments)} bytes of arguments were packed, the kernel takes {size.value}")
    buffer = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
    place = ctypes.addressof(buffer)
    return buffer, (ctypes.c_void_p * 5)(_POINTER, place, _SIZE, ctypes.addressof(size), _END)


class CudaKernel:
    """kernelseam.contract.LoadedKernel over a CUfunction."""

    def __init__(self, function: Any, facts: KernelFacts) -> None:
        self._function = function
        self._size = ctypes.c_size_t(max((offset + size for offset, size in facts.parameters), default=0))
        self._allowed = _WITHOUT_OPT_IN - facts.shared_bytes
        self._lock = new_lock()

    def prepare(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, arguments: bytes
    ) -> Callable[[int], None]:
        self._allow(shared_bytes)
        buffer, extra = argument_list(arguments, self._size)
        run, function, address = bindings.driver().cuLaunchKernel, self._function, ctypes.addressof(extra)

        def launch(stream: int, keep: object = (buffer, extra, self._size)) -> None:
            (status,) = run(function, *grid, *block, shared_bytes, stream, 0, address)
            if status:
                bindings.fail("cuLaunchKernel", status, f"grid {grid}, block {block}, {shared_bytes} bytes shared")

        return launch

    def _allow(self, shared_bytes: int) -> None:
        """Opt in to that much dynamic shared memory, never back to less: other plans share the function."""
        with self._lock:
            if shared_bytes > self._allowed:
                which = bindings.driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                bindings.call("cuFuncSetAttribute", self._function, which, shared_bytes)
                self._allowed = shared_bytes


def load(module: Any, name: str, facts: KernelFacts) -> CudaKernel:
    """The kernel of a module of the current context, on the device when this returns.

    Loading at the first launch, as the driver does by default, would synchronise, and fail inside a graph's capture.
    """
    function = bindings.call("cuModuleGetFunction", module, name.encode())
    if bindings.call("cuDriverGetVersion") >= _LOADS:
        bindings.call("cuFuncLoad", function)
    return CudaKernel(function, facts)
