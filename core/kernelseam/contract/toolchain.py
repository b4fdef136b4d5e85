"""Compiling and launching: what a backend brings to kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kernelseam.contract.devices import Device
from kernelseam.contract.launching import LoadedKernel
from kernelseam.contract.tensor_map import TensorMap
from kernelseam.dtypes import DType

if TYPE_CHECKING:
    from kernelseam.costs import Coefficients


NOT_KNOWN = -1
"""A count that whoever made the facts cannot tell."""


@dataclass(frozen=True)
class SourceBundle:
    """All that shapes one binary: sources held in memory, constants, and the kernels it must
    contain.

    ``files`` maps include names to texts; the file named ``main`` is compiled. ``defines`` stand
    before it.
    """

    name: str
    main: str
    files: tuple[tuple[str, str], ...]
    defines: tuple[tuple[str, str], ...]
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The translation unit handed to the compiler, constants first."""
        head = "".join(f"#define {k} {v}\n" for k, v in self.defines)
        return f'{head}#include "{self.main}"\n'


@dataclass(frozen=True)
class KernelFacts:
    """What a binary, or the driver that loaded it, says of a kernel. Counts that nobody tells are
    NOT_KNOWN."""

    name: str
    registers: int
    spills: int
    """Bytes (or registers, where the format counts those) spilled to memory; 0 is wanted
    everywhere."""
    scratch_bytes: int
    shared_bytes: int
    matrix_instructions: int
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each kernel parameter, in order."""
    extra: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ArchRow:
    """One arch's row in its vendor's table: what shared kernels and their host halves need to know.

    ``tiles`` maps an operation ("gemm", "attention") to its rows of tile shapes; each operation's
    host half documents the columns it reads.
    """

    arch: str
    warp_size: int
    shared_bytes_per_block: int
    registers_per_lane: int
    platform: str
    """Include name of the platform header."""
    defines: tuple[tuple[str, str], ...]
    matrix_dtypes: frozenset[DType]
    tiles: Mapping[str, tuple[Any, ...]] = field(hash=False)
    options: tuple[str, ...] = ()
    cluster_blocks: int = 1
    """The most blocks of a cluster; 1 where there are no clusters."""
    programmatic_launch: bool = False
    """Whether it has programmatic dependent launch."""
    costs: Coefficients | None = field(default=None, compare=False)
    """None: nobody knows more than the peaks, and the roofline stands for a prediction."""


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
