"""The toolchain: shared kernels to shared objects of the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

from kernelseam.contract import ArchRow, Device, KernelFacts, LoadedKernel, SourceBundle
from kernelseam_hostcpp import archs, compiler
from kernelseam_hostcpp.library import library


class HostToolchain:
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
        return compiler.version()

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.arch_row(arch)
        return compiler.compile_bundle(bundle, arch)

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        """A host's compiler tells neither registers nor spills: they are 0. ``extra`` has the binary's size."""
        found = library(binary)
        return {found.name: KernelFacts(found.name, 0, 0, 0, 0, 0, found.parameters, {"bytes": len(binary)})}

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        return library(binary)


@cache
def sources() -> Mapping[str, str]:
    """Include name → text of every header of the platform."""
    folder = resources.files("kernelseam_hostcpp") / "kernels"
    texts = {f.name: f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".h")}
    return {n if n.startswith("platform") else f"host/{n}": texts[n] for n in sorted(texts)}
