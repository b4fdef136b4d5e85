"""Compiling and launching: what a backend brings to kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.binaries import KernelFacts, SourceBundle
from kernelseam.contract.devices import Device
from kernelseam.contract.launching import LoadedKernel
from kernelseam.contract.tensor_map import TensorMap


class Toolchain(Protocol):
    """What a backend brings to kernels, shared ones and its own."""

    @property
    def backend(self) -> str: ...

    @property
    def archs(self) -> tuple[str, ...]:
        """Every arch it compiles for, whether or not such a device is here."""

    def arch_row(self, arch: str) -> ArchRow:
        """The arch's row; raises UnknownName."""

    def platform_files(self, arch: str) -> Mapping[str, str]:
        """Include name → text of the backend's device sources for the arch, the platform header
        among them."""

    def compiler(self) -> str:
        """Name and version of the compiler, part of a binary's key. Raises CompileError if it
        cannot be loaded."""

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        """Source to binary, with the bundle's options: what else shapes a binary is not in its key.
        The text of the constant KS_KEY is found in the binary, which is refused otherwise. Raises
        CompileError with the compiler's log. A toolchain whose attribute ``compiles_beside`` is
        True is asked by several threads at once for the kernels of one plan: its compiler works
        without the interpreter, and beside itself."""

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        """Facts of each kernel in a binary, read without a device."""

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        """The kernel on the device; loading the same binary again is cheap."""

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        """Why the arch cannot have this tensor map over an address that is a multiple of
        ``alignment`` bytes, or None.

        A backend without tensor maps inherits WithoutTensorMaps."""

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        """The TENSOR_MAP_BYTES of a tensor map over an operand's address; needs the driver. Raises
        DeviceError."""
