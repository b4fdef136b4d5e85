"""The table of archs: what shared kernels and dispatch need to know of each. A new arch is a row here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import ArchRow
from kernelseam.dtypes import DType
from kernelseam.errors import UnknownName
from kernelseam.kernels.attention.host import AttentionTile
from kernelseam.kernels.gemm.host import GemmTile

HALVES = frozenset({DType.float16, DType.bfloat16})
SINGLE, DOUBLE = frozenset({DType.float32}), frozenset({DType.float64})

RESERVED = 128
"""Bytes of a block's LDS that the platform's block_any takes for itself."""

# Tiles of C and slices of K. Rows that the copies of a slice need in flight are registers, so a slice is short.
CDNA_GEMM = (
    GemmTile(HALVES, 128, 128, 32, 2, 2, 2, 2),
    GemmTile(HALVES, 128, 64, 64, 2, 2, 2),
    GemmTile(HALVES, 64, 64, 64, 2, 2, 2, 2),
    GemmTile(HALVES, 32, 32, 64, 2, 2, 2, 2),
    GemmTile(SINGLE, 128, 64, 16, 2, 2, 2, 2),
    GemmTile(SINGLE, 64, 64, 16, 2, 2, 2, 2),
    GemmTile(SINGLE, 32, 32, 16, 2, 2, 2, 2),
    GemmTile(DOUBLE, 64, 64, 16, 2, 2, 2),
    GemmTile(DOUBLE, 32, 32, 16, 2, 2, 2, 2),
)
RDNA_GEMM = (
    GemmTile(HALVES, 128, 128, 32, 4, 2, 2),
    GemmTile(HALVES, 128, 64, 32, 4, 2, 2),
    GemmTile(HALVES, 64, 64, 64, 2, 2, 2),
    GemmTile(HALVES, 32, 32, 64, 2, 2, 2),
    GemmTile(SINGLE, 128, 64, 16, 4, 2, 2),
    GemmTile(SINGLE, 64, 64, 16, 4, 2, 2),
    GemmTile(SINGLE, 32, 32, 16, 2, 2, 2),
    GemmTile(DOUBLE, 64, 64, 16, 4, 2, 2),
    GemmTile(DOUBLE, 32, 32, 16, 2, 2, 2),
)

# With 32 rows a wave every fragment that is read from LDS serves two matrix instructions: at 16 LDS would be the limit.
_SINGLE_ATTENTION = (
    AttentionTile(SINGLE, 64, 4, 16, 32, 1),
    AttentionTile(SINGLE, 128, 4, 16, 16, 1),
    AttentionTile(SINGLE, 256, 3, 8, 16, 1),
)
CDNA_ATTENTION = (
    AttentionTile(HALVES, 64, 4, 32, 32, 2, True, 2),
    AttentionTile(HALVES, 64, 4, 16, 64, 1, True, 2),
    AttentionTile(HALVES, 128, 4, 32, 32, 1, True),
    AttentionTile(HALVES, 128, 4, 16, 32, 2, True),
    AttentionTile(HALVES, 256, 4, 16, 16, 1, True),
    *_SINGLE_ATTENTION,
)
CDNA4_ATTENTION = (
    AttentionTile(HALVES, 64, 4, 32, 64, 2, True, 2),
    AttentionTile(HALVES, 64, 4, 16, 64, 2, True, 2),
    AttentionTile(HALVES, 128, 4, 32, 32, 2, True, 2),
    AttentionTile(HALVES, 128, 4, 16, 32, 2, True, 2),
    AttentionTile(HALVES, 256, 4, 16, 32, 2, True),
    *_SINGLE_ATTENTION,
)
# Queries that stay in registers take twice as many on gfx11, where both halves of a wave hold them.
RDNA3_ATTENTION = (
    AttentionTile(HALVES, 64, 8, 16, 32, 2, True),
    AttentionTile(HALVES, 64, 4, 16, 32, 2, True),
    AttentionTile(HALVES, 128, 8, 16, 32, 1),
    AttentionTile(HALVES, 128, 4, 16, 32, 1),
    AttentionTile(HALVES, 256, 4, 16, 16, 1),
    *_SINGLE_ATTENTION,
)
RDNA4_ATTENTION = (
    AttentionTile(HALVES, 64, 8, 16, 32, 2, True),
    AttentionTile(HALVES, 64, 4, 16, 32, 2, True),
    AttentionTile(HALVES, 128, 8, 16, 32, 1, True),
    AttentionTile(HALVES, 128, 4, 16, 32, 1, True),
    AttentionTile(HALVES, 256, 4, 16, 16, 1),
    *_SINGLE_ATTENTION,
)


def _row(
    arch: str, warp: int, simds: int, shared: int, registers: int, matrix: Mapping[str, str], tiles: Mapping[str, tuple[Any, ...]],
    options: tuple[str, ...] = (),
) -> ArchRow:
    defines = {"KS_WARP": str(warp), "KS_SIMDS": str(simds), **matrix}
    return ArchRow(
        arch=arch, warp_size=warp, shared_bytes_per_block=shared - RESERVED, registers_per_lane=registers,
        platform="platform_amd.h", defines=tuple(defines.items()), matrix_dtypes=HALVES, tiles=tiles, options=options,
    )


_MFMA16 = {"KS_MATRIX_HEADER": '"mfma.h"', "KS_MFMA_K": "16"}
_MFMA32 = {"KS_MATRIX_HEADER": '"mfma.h"', "KS_MFMA_K": "32"}
_WMMA11 = {"KS_MATRIX_HEADER": '"wmma.h"', "KS_WMMA": "11"}
_WMMA12 = {"KS_MATRIX_HEADER": '"wmma.h"', "KS_WMMA": "12"}
_CDNA = {"gemm": CDNA_GEMM, "attention": CDNA_ATTENTION}
_CDNA4 = {"gemm": CDNA_GEMM, "attention": CDNA4_ATTENTION}
_RDNA3 = {"gemm": RDNA_GEMM, "attention": RDNA3_ATTENTION}
_RDNA4 = {"gemm": RDNA_GEMM, "attention": RDNA4_ATTENTION}
_CU_MODE = ("-mcumode",)
"""On RDNA a block stays on one compute unit: its waves share that unit's LDS and caches."""

ROWS = {
    r.arch: r
    for r in (
        _row("gfx90a", 64, 4, 65536, 512, _MFMA16, _CDNA),
        _row("gfx942", 64, 4, 65536, 512, _MFMA16, _CDNA),
        _row("gfx950", 64, 4, 163840, 512, _MFMA32, _CDNA4),
        _row("gfx1100", 32, 2, 65536, 256, _WMMA11, _RDNA3, _CU_MODE),
        _row("gfx1201", 32, 2, 65536, 256, _WMMA12, _RDNA4, _CU_MODE),
    )
}


def _rates(half: int, single: int, double: int) -> dict[DType, int]:
    return {DType.float16: half, DType.bfloat16: half, DType.float32: single, DType.float64: double}


RATES = {
    "gfx90a": _rates(1024, 128, 128),
    "gfx942": _rates(2048, 256, 128),
    "gfx950": _rates(4096, 256, 128),
    "gfx1100": _rates(512, 256, 4),
    "gfx1201": _rates(1024, 256, 4),
}
"""Dense operations of a compute unit in one clock: matrix units for the halves, vector units for the others. Derived
from the peak rates, clocks and unit counts of AMD's product sheets."""


def row(arch: str) -> ArchRow:
    """The arch's row; raises UnknownName with those there are."""
    try:
        return ROWS[arch]
    except KeyError:
        raise UnknownName(
            "arch", arch, f"must be one of {', '.join(ROWS)}", "Name one of these, or add a row to kernelseam_rocm.archs"
        ) from None


def matrix_headers(row: ArchRow) -> set[str]:
    """The platform's headers that only archs like this one include."""
    return {dict(row.defines)["KS_MATRIX_HEADER"].strip('"')}
