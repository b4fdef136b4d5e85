"""Cycles of instructions on a compute unit: the table, each entry with its mark and source, and the
sum for a loop.

Cycles are of a machine that never waits: no latency, no caches, no clock. They rank changes to a
kernel; they predict no seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

from kernelseam.contract import of_arch
from kernelseam.errors import UnknownName

T = TypeVar("T")


class Mark(StrEnum):
    """How reliable an entry is."""

    COUNTED = "counted"
    """Exact for what was compiled, or for what ran."""
    MODELLED = "modelled"
    """From a document or from somebody's published measurement."""
    GUESSED = "guessed"
    """By analogy, or from memory of a document that was not at hand."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A value of the table and its source."""

    value: T
    mark: Mark
    source: str


Phases = tuple[tuple[int, ...], ...]
"""An access of a wave to LDS is served in phases of one clock each: the lanes of each."""


@dataclass(frozen=True)
class Banks:
    """How LDS serves accesses of a width."""

    count: int
    """Banks of 4 bytes."""
    phases: Phases


Widths = Mapping[int, Entry[Banks]]
"""By the bytes a lane of an access; narrower ones are served as those of 4 bytes."""


@dataclass(frozen=True)
class ComputeUnit:
    """One arch's. Cycles are of one SIMD's issue, clocks of the unit's LDS; both of one clock
    domain."""

    lanes: int
    simds: Entry[int]
    issue: Entry[int]
    """Cycles in which a SIMD takes an instruction of a wave that is neither matrix nor
    transcendental."""
    transcendental: Entry[int]
    matrix: Mapping[str, Entry[int]]
    """Cycles of a SIMD's matrix unit by shape, of half-precision operands."""
    overlaps: Entry[bool]
    """Whether vector instructions of one wave run beside matrix instructions of another."""
    reads: Widths
    writes: Widths
    cross_lane: Entry[int]
    """LDS clocks of a permutation of lanes."""
    registers: Entry[int]
    """Vector registers of a lane on a SIMD, of all its waves; with AGPRs."""
    granule: Entry[int]
    """Registers are given out in multiples of it."""
    most_waves: Entry[int]
    """Of a SIMD."""
    lds_bytes: Entry[int]

    def banks(self, reads: bool, width: int) -> Banks:
        """How LDS serves reads, or writes, of a width."""
        return (self.reads if reads else self.writes)[max(width, 4)].value

    def matrix_cycles(self, shape: str) -> int:
        """Of a shape with or without its types. Raises UnknownName for one the table lacks."""
        match = re.match(r"\d+x\d+x\d+", shape)
        if match is None or match[0] not in self.matrix:
            raise UnknownName(
                "matrix instruction",
                shape,
                f"must be of a shape in the model: {', '.join(self.matrix)}",
                "Add it to the table, with its source",
            )
        return self.matrix[match[0]].value


# ---------------------------------------------------------------- sources

_LLVM = "LLVM's SISchedule.td: passes of 4 cycles"
_FLOPS = "AMD's FLOPS/clock/CU, of two SIMDs: 512 of RDNA 3, 1024 of RDNA 4 (GPUOpen, matrix cores)"
_CDNA_ISSUE = "ROCm Compute Profiler's documentation: SIMDs of 16 lanes, waves of 64"
_RDNA_ISSUE = "RDNA 3 ISA guide: SIMDs of 32 lanes, waves of 32"
_KITTENS = "HipKittens (arXiv 2511.08083): phases and banks by instruction, measured on MI355X"
_GROUPS = (
    "published code that quotes AMD for gfx942, no document of AMD's was found; HipKittens "
    "measured the same for 12 bytes on MI355X"
)
_CK = "Composable Kernel's documentation, LDS bank conflicts: 8 lanes in order, 32 banks"
_PRODUCT = "AMD's ISA guide and LLVM's AMDGPU usage: register file and occupancy"


def _modelled(value: T, source: str) -> Entry[T]:
    return Entry(value, Mark.MODELLED, source)


def _guessed(value: T, source: str) -> Entry[T]:
    return Entry(value, Mark.GUESSED, source)


# ---------------------------------------------------------------- LDS


def _runs(lanes: int, run: int) -> Phases:
    """Lanes in order, a fixed number per phase."""
    return tuple(tuple(range(i, i + run)) for i in range(0, lanes, run))


def _twice(groups: tuple[tuple[int, ...], ...]) -> Phases:
    """Groups of the first 32 lanes, and the same of the others."""
    return (*groups, *(tuple(lane + 32 for lane in group) for group in groups))


def _four(*starts: int) -> tuple[int, ...]:
    """Four lanes from each of these on."""
    return tuple(lane for start in starts for lane in range(start, start + 4))


_EIGHTS = _twice((_four(0, 20), _four(4, 16), _four(8, 28), _four(12, 24)))
_SIXTEENS = _twice((_four(0, 12, 20, 24), _four(4, 8, 16, 28)))
_ANALOGY = "as many lanes, in order, as fill the banks"


def _in_order(lanes: int, banks: int) -> dict[int, Entry[Banks]]:
    """As many lanes per phase as fill the banks; 12 bytes count as 16."""
    runs = {w: min(lanes, banks * 4 // (16 if w == 12 else w)) for w in (4, 8, 12, 16)}
    return {w: _guessed(Banks(banks, _runs(lanes, n)), _ANALOGY) for w, n in runs.items()}


_CDNA_WRITES: Widths = {**_in_order(64, 32), 16: _modelled(Banks(32, _runs(64, 8)), _CK)}
_CDNA3_READS: Widths = {**_in_order(64, 32), 16: _guessed(Banks(32, _EIGHTS), _GROUPS)}
_CDNA4_READS: Widths = {
    **_in_order(64, 64),
    8: _modelled(Banks(64, _runs(64, 32)), _KITTENS),
    12: _modelled(Banks(32, _EIGHTS), _KITTENS),
    16: _modelled(Banks(64, _SIXTEENS), _KITTENS),
}
_CDNA4_WRITES: Widths = {**_CDNA_WRITES, 8: _modelled(Banks(32, _runs(64, 16)), _KITTENS)}
_RDNA_LDS = _in_order(32, 32)

# ---------------------------------------------------------------- the archs


def _cdna(
    *,
    matrix: Mapping[str, int],
    transcendental: Entry[int],
    reads: Widths,
    writes: Widths,
    lds_bytes: int,
    tf32: Mapping[str, Entry[int]] = MappingProxyType({}),
) -> ComputeUnit:
    return ComputeUnit(
        lanes=64,
        simds=_modelled(4, _PRODUCT),
        issue=_modelled(4, _CDNA_ISSUE),
        transcendental=transcendental,
        matrix={**{shape: _modelled(cycles, _LLVM) for shape, cycles in matrix.items()}, **tf32},
        overlaps=_modelled(True, "LLVM's SISchedule.td: MFMA has a unit beside the VALU"),
        reads=reads,
        writes=writes,
        cross_lane=_guessed(2, "64 lanes of 4 bytes through 32 banks"),
        registers=_modelled(512, _PRODUCT),
        granule=_modelled(8, _PRODUCT),
        most_waves=_modelled(8, _PRODUCT),
        lds_bytes=_modelled(lds_bytes, _PRODUCT),
    )


def _rdna(matrix: int) -> ComputeUnit:
    return ComputeUnit(
        lanes=32,
        simds=_modelled(2, _PRODUCT),
        issue=_modelled(1, _RDNA_ISSUE),
        transcendental=_guessed(4, "memory of AMD's RDNA white paper: a quarter of the rate"),
        matrix={"16x16x16": _modelled(matrix, _FLOPS)},
        overlaps=_guessed(False, "forum posts: WMMA issues through the VALU"),
        reads=_RDNA_LDS,
        writes=_RDNA_LDS,
        cross_lane=_guessed(1, "32 lanes of 4 bytes through 32 banks"),
        registers=_modelled(1536, _PRODUCT),
        granule=_modelled(24, _PRODUCT),
        most_waves=_modelled(16, _PRODUCT),
        lds_bytes=_modelled(65536, "in CU mode, as these kernels are compiled"),
    )


_QUARTER = _modelled(16, f"{_LLVM}; a quarter of the rate")
UNITS: Mapping[str, ComputeUnit] = {
    "gfx90a": _cdna(
        matrix={"16x16x16": 32, "32x32x8": 64},
        transcendental=_QUARTER,
        reads=_CDNA3_READS,
        writes=_CDNA_WRITES,
        lds_bytes=65536,
    ),
    "gfx942": _cdna(
        matrix={"16x16x16": 16, "32x32x8": 32, "16x16x32": 16},
        tf32={"16x16x8": _modelled(16, "AMD's product page of the MI300X: half of halves' FLOPS")},
        transcendental=_QUARTER,
        reads=_CDNA3_READS,
        writes=_CDNA_WRITES,
        lds_bytes=65536,
    ),
    "gfx950": _cdna(
        # CDNA 3's shapes take as long as there: half of the rate.
        matrix={"16x16x16": 16, "32x32x8": 32, "16x16x32": 16, "32x32x16": 32},
        transcendental=_guessed(8, "memory of AMD's statement of twice the rate; LLVM's model: 16"),
        reads=_CDNA4_READS,
        writes=_CDNA4_WRITES,
        lds_bytes=163840,
    ),
    "gfx1100": _rdna(32),
    "gfx1151": _rdna(32),
    "gfx1200": _rdna(16),
    "gfx1201": _rdna(16),
}
"""By arch."""


def unit(arch: str) -> ComputeUnit:
    """An arch's compute unit. Raises UnknownName with those there are."""
    return of_arch(UNITS, arch, "Name one of these, or add it to the model with its sources")


# ---------------------------------------------------------------- how cycles add up


@dataclass(frozen=True)
class Cycles:
    """Of one wave: of its SIMD's matrix unit, vector unit and issue of all else; LDS clocks of the
    compute unit, which its SIMDs share."""

    matrix: float = 0
    vector: float = 0
    other: float = 0
    lds: float = 0

    def shares(self, unit: ComputeUnit) -> tuple[float, float]:
        """The part of all cycles in which a SIMD's matrix unit works, with one and with two waves a
        SIMD, if nothing ever waits for memory. One wave overlaps nothing but LDS; of two, matrix
        and vector instructions overlap (not on RDNA), and so does all else."""
        lds = self.lds * unit.simds.value
        alone = self.matrix + self.vector + self.other
        together = (max if unit.overlaps.value else _sum)(self.matrix, self.vector)
        one, two = max(alone, lds), max(2 * together, 2 * lds, alone)
        return (self.matrix / one if one else 0.0, 2 * self.matrix / two if two else 0.0)


def _sum(a: float, b: float) -> float:
    return a + b


def occupancy(unit: ComputeUnit, registers: int, lds_bytes: int, waves: int) -> int:
    """Waves that a SIMD can hold of blocks of ``waves`` waves, by registers of a lane and bytes of
    LDS a block."""
    granule = unit.granule.value
    allocated = -(-max(registers, 1) // granule) * granule
    by_registers = min(unit.most_waves.value, unit.registers.value // allocated)
    simds = unit.simds.value
    blocks = min(unit.lds_bytes.value // max(lds_bytes, 1), by_registers * simds // waves)
    return blocks * waves // simds
