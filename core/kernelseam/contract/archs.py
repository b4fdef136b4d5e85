"""Archs: the row of each in its vendor's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, TypeVar

from kernelseam.contract.devices import ABSENT, Device, DeviceLimits
from kernelseam.dtypes import DType
from kernelseam.errors import UnknownName
from kernelseam.frozen import dataclass

T = TypeVar("T")


@dataclass(frozen=True)
class LibraryRate:
    """Cost coefficients of a vendor library's products of one dtype."""

    block: int
    """Rows and columns of the library's widest output tile; it has narrower ones too."""
    rate: float
    """The fraction of the device's peak that it reaches."""
    block_seconds: float
    """Overhead of a block on its compute unit; every matrix, however small, has its own blocks."""
    start_seconds: float = 0.0
    """The first blocks' prologue and the last ones' epilogue, which nothing overlaps, of the
    widest tile."""
    edge: float = 0.0
    """Its loads, as rows and columns of a tile: narrower tiles reach less of the rate."""
    step_seconds: float = 0.0
    """Latency of 128 bytes of K in a block, where nothing overlaps it; ``few_step_seconds`` in a
    product of few rows."""
    few_step_seconds: float = 0.0
    few_seconds: float = 0.0
    """Added in a product of few rows, but more than one."""
    few_wave_seconds: float = 0.0
    """Added in one of a batch, for each matrix of a unit beyond the first."""
    thin_seconds: float = 0.0
    """Added where K is up to 128 bytes and blocks do not all run at once."""
    split_seconds: float | None = None
    """The reduction after split-K, by which few tiles fill the device; None: it does not split
    K."""
    tf32: float = 1.0
    """Speed-up of TF32 over float32, where it has TF32."""
    few_rows: float = 1.0
    """The fraction of a copy's bandwidth at which it reads the matrix of a product of few rows."""


@dataclass(frozen=True)
class Coefficients:
    """An arch's cost coefficients: fractions of a device's peaks. A row of its vendor's table."""

    source: str
    """The device that they were measured on, or "estimated"."""
    bandwidth: float = 1.0
    """The fraction of the peak bandwidth that a copy reaches, reads and writes together."""
    multiply: Mapping[DType, float] = field(default_factory=dict, hash=False)
    """The fraction of the peak rate of the shared kernels' matrix instructions, by dtype; 1 where a
    dtype is missing. A tile's rate is relative to it."""
    call_seconds: float = 0.0
    """Overhead of a library call over a launch."""
    libraries: Mapping[str, Mapping[DType, LibraryRate]] = field(default_factory=dict, hash=False)
    """By implementation and dtype."""

    @property
    def is_measured(self) -> bool:
        """Whether they were fitted to times on a device."""
        return self.source != "estimated"


@dataclass(frozen=True)
class ArchRow:
    """One arch's row in its vendor's table, with what shared kernels and their definitions use.

    ``tiles`` maps an operation ("gemm", "attention") to its rows of tile shapes; each operation's
    kernel definition documents the columns it reads.
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
    """Maximum cluster size in blocks; 1 without clusters."""
    programmatic_launch: bool = False
    """Whether it has programmatic dependent launch."""
    fp8_dtypes: frozenset[DType] = frozenset()
    """The dtypes of 8 bits that it converts: its row has the define KS_E4M3 for them, and tiles."""
    costs: Coefficients | None = field(default=None, compare=False)
    """None: costs are predicted by the roofline."""
    product: Device | None = field(default=None, compare=False)
    """A device of this arch as its data sheet has it, with evidence ABSENT: what ``explain --arch``
    and bundles reason about where no such device is here. None if unknown."""
    more_products: tuple[Device, ...] = field(default=(), compare=False)
    """Further devices of this arch, which ``--arch`` finds by their names."""
    family: str = field(default="", compare=False)
    """The arch in the names of distributions of its binaries; "" for its own name."""


def of_arch(table: Mapping[str, T], arch: str, remedy: str) -> T:
    """An arch's entry of a table; raises UnknownName with those there are."""
    if arch not in table:
        raise UnknownName("arch", arch, f"must be one of {', '.join(table)}", remedy)
    return table[arch]


DataSheet = tuple[str, int, int, float, int]
"""Of a device: its name, units, peak clock in MHz, bytes of memory bandwidth in a second, GB of
memory."""


def devices_of_sheets(
    backend: str,
    arch: str,
    sheets: Iterable[DataSheet],
    rates: Mapping[DType, int],
    **limits: Any,
) -> Iterator[Device]:
    """Devices that are not here, by their data sheets. ``rates``: dense operations of a unit in one
    clock; ``limits``: further fields of their ``DeviceLimits``."""
    for name, units, megahertz, bandwidth, gigabytes in sheets:
        own = DeviceLimits(
            compute_units=units,
            memory_bytes=gigabytes * 10**9,
            bytes_per_second=bandwidth,
            operations_per_second={d.value: n * units * megahertz * 1e6 for d, n in rates.items()},
            **limits,
        )
        yield Device(backend, 0, arch, name, own, ABSENT)
