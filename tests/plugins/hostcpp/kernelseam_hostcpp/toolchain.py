"""The toolchain: shared kernels to shared objects of the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from kernelseam.contract import (
    ArchRow,
    Device,
    KernelFacts,
    LoadedKernel,
    SourceBundle,
    WithoutTensorMaps,
)

from kernelseam_hostcpp import archs, compiler
from kernelseam_hostcpp.library import Library, library
from kernelseam_hostcpp.sources import digest, sources


class HostToolchain(WithoutTensorMaps):
    """kernelseam.contract.Toolchain over the system's C++ compiler."""

    backend = "hostcpp"

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(archs.ROWS)

    def arch_row(self, arch: str) -> ArchRow:
        return archs.row(arch)

    def platform_files(self, arch: str) -> Mapping[str, str]:
        return sources()

    def compiler(self) -> str:
        return f"{compiler.version()}, launched by {digest()}"

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.arch_row(arch)
        return compiler.compile_bundle(bundle, arch)

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        """``extra`` has the binary's size."""
        result = library(binary)
        return {result.name: replace(result.facts, extra={"bytes": len(binary)})}

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        return library(binary)


@cache
def kernel_of(bundle: SourceBundle) -> Library:
    """The kernel of sources that have no key, which no cache on disk keeps: compiled once in a
    process."""
    return library(HostToolchain().compile(bundle, "host"))
