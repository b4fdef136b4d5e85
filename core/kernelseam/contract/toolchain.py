"""The toolchain of a backend: compile, inspect and load kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from kernelseam.contract.archs import ArchRow
from kernelseam.contract.binaries import KernelFacts, SourceBundle
from kernelseam.contract.devices import Device
from kernelseam.contract.launching import LoadedKernel
from kernelseam.contract.tensor_map import TensorMap


class Toolchain(Protocol):
    """Compiles, inspects and loads a backend's kernels, shared ones and its own."""

    @property
    def backend(self) -> str: ...

    @property
    def archs(self) -> tuple[str, ...]:
        """All archs that it compiles for, with or without such a device."""

    def arch_row(self, arch: str) -> ArchRow:
        """The arch's row; raises UnknownName."""

    def platform_files(self, arch: str) -> Mapping[str, str]:
        """Include name → text of the backend's device sources for the arch, the platform header
        among them."""

    def compiler(self) -> str:
        """Name and version of the compiler, part of a binary's key. Raises CompileError if it
        cannot be loaded."""

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        """Compile a bundle with its options, and no others: the binary's key covers only these. The
        binary must contain the text of the constant KS_KEY. Raises CompileError with the
        compiler's log. Where the attribute ``compiles_beside`` is True, several threads compile the
        kernels of one plan concurrently: the compiler must release the GIL and be thread-safe."""

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        """Facts of each kernel in a binary, read without a device."""

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        """The kernel on the device; loading the same binary again is cheap."""

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        """Why the arch does not support this tensor map over an address that is a multiple of
        ``alignment`` bytes, or None.

        A backend without tensor maps inherits WithoutTensorMaps."""

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        """The TENSOR_MAP_BYTES of a tensor map over an operand's address; needs the driver. Raises
        DeviceError."""


@runtime_checkable
class TensorMapEncoder(Protocol):
    """An optional extension of Toolchain: calls on new extents use it instead of
    ``encode_tensor_map``."""

    def tensor_map_encoder(
        self, template: TensorMap
    ) -> Callable[[tuple[int, ...], tuple[int, ...], int], bytes]:
        """``encode(extents, strides, address)``: the bytes of a tensor map of these extents and
        strides, in elements, whose first element is at the address; the rest is the template's.
        Several threads may encode at a time. Raises DeviceError."""


@runtime_checkable
class AddressFirstEncoder(TensorMapEncoder, Protocol):
    """An optional extension of TensorMapEncoder: calls whose extents and strides come again use it
    instead of encoding a tensor map for each address."""

    def address_first_encoder(
        self, template: TensorMap
    ) -> Callable[[tuple[int, ...], tuple[int, ...], int], tuple[bytes, int] | None]:
        """``tail(extents, strides, address)``: (bytes, end). Over every address below ``end`` the
        tensor map is the address, in 8 bytes from the least significant on, and behind it these
        bytes. None where no such rule is known. Raises DeviceError."""
