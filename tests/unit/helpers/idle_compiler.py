"""A compiler that compiles nothing, for processes with a driver that does nothing: what their calls
bind and launch is the host's own work."""

from __future__ import annotations

import ctypes
from typing import Any

from kernelseam.contract import KernelFacts, LaunchConfig
from kernelseam.kernels.signature import Signature
from kernelseam_cuda import launch, toolchain


class Facts(dict[str, KernelFacts]):
    """Of any kernel."""

    def __missing__(self, name: str) -> KernelFacts:
        return KernelFacts(name, 64, 0, 0, 0, 8, ())


def compile_nothing() -> None:
    """A binary is its sources, and parameters lie where the host packs them."""
    compiler: Any = toolchain.CudaToolchain
    compiler.compiler = lambda self: "none: no binary is run"  # in the keys of the cache, too
    compiler.compile = lambda self, bundle, arch: bundle.text().encode()
    compiler._inspect = lambda self, *binary: Facts()
    Signature.placed = lambda self, facts: self  # type: ignore[method-assign]
    kernel: Any = launch.CudaKernel
    prepare, reusable = kernel.prepare, kernel.reusable

    def prepare_of_any_size(self: Any, config: LaunchConfig, arguments: bytes) -> Any:
        self._size = ctypes.c_size_t(len(arguments))
        return prepare(self, config, arguments)

    def reusable_of_any_size(self: Any, config: LaunchConfig, packer: Any) -> Any:
        self._size = ctypes.c_size_t(packer.size)
        return reusable(self, config, packer)

    kernel.prepare, kernel.reusable = prepare_of_any_size, reusable_of_any_size
