"""A compiled kernel in this process: a shared object, its parameters, its launches."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from kernelseam.contract import KernelFacts, LaunchConfig
from kernelseam.errors import DeviceError
from kernelseam.forking import new_lock

_MESSAGE = 512
_loaded: dict[str, Library] = {}
_lock = new_lock()


class Library:
    """The shared object of one binary, and contract.LoadedKernel over its kernel."""

    def __init__(self, binary: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="kernelseam-hostcpp-") as folder:
            place = Path(folder) / "kernel.so"
            place.write_bytes(binary)
            self._library = ctypes.CDLL(str(place))  # what is mapped stays when the file is gone
        self._run = self._library.kernelseam_launch
        self._run.argtypes = (
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_size_t,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )

        self._library.kernelseam_name.restype = ctypes.c_char_p

    @property
    def name(self) -> str:
        """The kernel's."""
        result: bytes = self._library.kernelseam_name()
        return result.decode()

    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter, as the compiler laid them out from the kernel's
        type."""
        offset, size = ctypes.c_int(), ctypes.c_int()
        results = []
        for i in range(self._library.kernelseam_parameter_count()):
            self._library.kernelseam_parameter(i, ctypes.byref(offset), ctypes.byref(size))
            results.append((offset.value, size.value))
        return tuple(results)

    @property
    def facts(self) -> KernelFacts:
        """A host's compiler tells neither registers nor spills: they are 0."""
        return KernelFacts(self.name, 0, 0, 0, 0, 0, self.parameters)

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        config.require_plain("hostcpp")
        grid, block, shared_bytes = config.grid, config.block, config.shared_bytes
        if grid[1:] != (1, 1) or block[1:] != (1, 1):
            raise DeviceError(f"grid {grid}, block {block}: the host has one axis of each")

        def launch(stream: int) -> None:
            message = ctypes.create_string_buffer(_MESSAGE)
            if self._run(
                arguments, len(arguments), grid[0], block[0], shared_bytes, message, _MESSAGE
            ):
                raise DeviceError(message.value.decode(errors="replace"))

        return launch


def library(binary: bytes) -> Library:
    """The binary's shared object, loaded once in a process."""
    key = hashlib.sha256(binary).hexdigest()
    with _lock:
        if key not in _loaded:
            _loaded[key] = Library(binary)
        return _loaded[key]
