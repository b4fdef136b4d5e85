"""The table of archs: what shared kernels and dispatch need to know of each. A new arch is a row here."""

from __future__ import annotations

from kernelseam.contract import ArchRow
from kernelseam.dtypes import DType
from kernelseam.errors import UnknownName

_HALVES = frozenset({DType.float16, DType.bfloat16})
_CU_MODE = ("-mcumode",)
"""On RDNA a block stays on one compute unit: its waves share that unit's LDS and caches."""


def _row(arch: str, family: str, warp: int, shared: int, registers: int, options: tuple[str, ...] = ()) -> ArchRow:
    return ArchRow(
        arch=arch, warp_size=warp, shared_bytes_per_block=shared, registers_per_lane=registers, platform="platform.h",
        defines=((f"KS_{family}", "1"),), matrix_dtypes=_HALVES, tiles={}, options=options,
    )


ROWS = {
    r.arch: r
    for r in (
        _row("gfx90a", "CDNA2", 64, 65536, 512),
        _row("gfx942", "CDNA3", 64, 65536, 512),
        _row("gfx950", "CDNA4", 64, 163840, 512),
        _row("gfx1100", "RDNA3", 32, 65536, 256, _CU_MODE),
        _row("gfx1201", "RDNA4", 32, 65536, 256, _CU_MODE),
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
"""Dense operations of a compute unit in one clock: matrix units for the halves, vector units for the others.

Sources: AMD's "Matrix Instruction" pages of the CDNA2, CDNA3, CDNA4, RDNA3 and RDNA4 ISA references and product sheets.
"""


def row(arch: str) -> ArchRow:
    """The arch's row; raises UnknownName with those there are."""
    try:
        return ROWS[arch]
    except KeyError:
        raise UnknownName(
            "arch", arch, f"must be one of {', '.join(ROWS)}", "Name one of these, or add a row to kernelseam_rocm.archs"
        ) from None
