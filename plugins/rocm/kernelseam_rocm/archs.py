"""The table of archs: what shared kernels and dispatch need to know of each. A new arch is a row
here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import ArchRow, Coefficients, LibraryRate, devices_of_sheets, of_arch
from kernelseam.dtypes import DType

from kernelseam_rocm import tiles

RESERVED = 256
"""Bytes of a block's LDS that the platform takes for itself: block_any's word, and what aligns the
rest to a line of 64 banks."""

_HALF, _OTHER = LibraryRate(128, 0.8, 3e-7), LibraryRate(64, 0.8, 3e-7)
_LIBRARY = {
    DType.float16: _HALF,
    DType.bfloat16: _HALF,
    DType.float32: _OTHER,
    DType.float64: _OTHER,
}
ESTIMATED = Coefficients(
    "estimated: none was measured",
    bandwidth=0.85,
    multiply=dict.fromkeys(DType, 0.8),
    call_seconds=3e-6,
    libraries={"hipblas": _LIBRARY, "hipblas-batched": _LIBRARY},
)
"""What is left of the peaks, of every arch alike; a library's blocks as NVIDIA's."""


def _rates(half: int, single: int, double: int, stored: DType | None = None) -> dict[DType, int]:
    rates = {
        DType.float16: half,
        DType.bfloat16: half,
        DType.float32: single,
        DType.float64: double,
    }
    return rates | ({stored: 2 * half} if stored else {})


RATES = {
    "gfx90a": _rates(1024, 128, 128),
    "gfx942": _rates(2048, 256, 128, DType.float8_e4m3fnuz),
    "gfx950": _rates(4096, 256, 128, DType.float8_e4m3fn),
    "gfx1100": _rates(512, 256, 4),
    "gfx1151": _rates(512, 256, 4),
    "gfx1200": _rates(1024, 256, 4, DType.float8_e4m3fn),
    "gfx1201": _rates(1024, 256, 4, DType.float8_e4m3fn),
}
"""Dense operations of a compute unit in one clock: matrix units for half precision and e4m3, vector
units for the others. Derived from the peak rates, clocks and unit counts of AMD's product
sheets."""

PRODUCTS = {
    "gfx90a": (
        ("AMD Instinct MI210", 104, 1700, 1.6e12, 64),
        ("AMD Instinct MI250X, one of its two dies", 110, 1700, 1.6e12, 64),
    ),
    "gfx942": (
        ("AMD Instinct MI300X", 304, 2100, 5.3e12, 192),
        ("AMD Instinct MI325X", 304, 2100, 6.0e12, 256),
    ),
    "gfx950": (
        ("AMD Instinct MI355X", 256, 2400, 8e12, 288),
        ("AMD Instinct MI350X", 256, 2200, 8e12, 288),
    ),
    "gfx1100": (
        ("AMD Radeon RX 7900 XTX", 96, 2500, 9.6e11, 24),
        ("AMD Radeon RX 7900 XT", 84, 2400, 8e11, 20),
        ("AMD Radeon PRO W7900", 96, 2495, 8.64e11, 48),
    ),
    "gfx1151": (("AMD Radeon 8060S", 40, 2900, 2.56e11, 96),),
    "gfx1200": (("AMD Radeon RX 9060 XT", 32, 3130, 3.2e11, 16),),
    "gfx1201": (
        ("AMD Radeon RX 9070 XT", 64, 2970, 6.4e11, 16),
        ("AMD Radeon RX 9070", 56, 2520, 6.4e11, 16),
    ),
}
"""Products of each arch, the first of which stands for it: name, compute units, peak clock in MHz,
bytes of memory bandwidth in a second, GB of memory. Source: AMD's product pages."""


STORED = {
    "gfx942": DType.float8_e4m3fnuz,
    **dict.fromkeys(("gfx950", "gfx1200", "gfx1201"), DType.float8_e4m3fn),
}
"""The dtype of 8 bits that an arch's instructions convert and multiply. Source: AMD's manuals of
its instruction sets."""


def _row(
    arch: str,
    warp: int,
    simds: int,
    shared: int,
    registers: int,
    banks: int,
    matrix: Mapping[str, str],
    shapes: Mapping[str, tuple[Any, ...]],
    options: tuple[str, ...] = (),
) -> ArchRow:
    defines = {"KS_WARP": str(warp), "KS_SIMDS": str(simds), "KS_LDS_BANKS": str(banks), **matrix}
    product, *others = devices_of_sheets(
        "rocm", arch, PRODUCTS[arch], RATES[arch], shared_bytes_per_block=shared
    )
    stored = STORED.get(arch)
    if stored is not None:
        defines["KS_E4M3"] = "1"
        shapes = {
            **shapes,
            "attention": tiles.with_stored(shapes["attention"], stored),
            "gemm": tiles.with_stored_gemm(shapes["gemm"], stored),
        }
    if "KS_XF32" in matrix:
        shapes = {**shapes, "gemm": (*shapes["gemm"], *tiles.TF32_GEMM)}
    return ArchRow(
        arch=arch,
        warp_size=warp,
        shared_bytes_per_block=shared - RESERVED,
        registers_per_lane=registers,
        platform="platform_amd.h",
        defines=tuple(defines.items()),
        matrix_dtypes=tiles.HALF_PRECISION | ({stored} if stored else set()),
        fp8_dtypes=frozenset({stored} if stored else ()),
        tiles=shapes,
        options=(*_OPTIONS, *options),
        costs=ESTIMATED,
        product=product,
        more_products=tuple(others),
    )


_MFMA16 = {"KS_MATRIX_HEADER": '"mfma.h"', "KS_MFMA_K": "16"}
_MFMA32 = {"KS_MATRIX_HEADER": '"mfma.h"', "KS_MFMA_K": "32", "KS_BF16_CONVERTS": "1"}
_XF32 = {"KS_XF32": "1"}  # TF32, of all archs this one alone
_FLUSHES = {"KS_FLUSHES_SUBNORMALS": "1"}  # in its MFMA: subnormal 16-bit numbers count as zeros
_WMMA11 = {"KS_MATRIX_HEADER": '"wmma.h"', "KS_WMMA": "11"}
_WMMA12 = {"KS_MATRIX_HEADER": '"wmma.h"', "KS_WMMA": "12"}
_CDNA = {
    "gemm": tiles.CDNA_GEMM,
    "gemv": tiles.CDNA_GEMV,
    "attention": tiles.CDNA_ATTENTION,
    "attention_decode": tiles.CDNA_DECODE,
    "attention_bwd": tiles.CDNA_ATTENTION_BWD,
}
_GFX90A = {
    **{k: t for k, t in _CDNA.items() if k != "attention_decode"},  # it would spill
    "gemm": tiles.GFX90A_GEMM,
    "attention": tiles.GFX90A_ATTENTION,
}
_CDNA4 = {
    "gemm": tiles.CDNA_GEMM,
    "gemv": tiles.CDNA_GEMV,
    "attention": tiles.CDNA4_ATTENTION,
    "attention_decode": tiles.CDNA4_DECODE,
    "attention_bwd": tiles.CDNA_ATTENTION_BWD,
}
_RDNA3 = {
    "gemm": tiles.RDNA3_GEMM,
    "gemv": tiles.RDNA_GEMV,
    "attention": tiles.RDNA3_ATTENTION,
    "attention_decode": tiles.RDNA_DECODE,
    "attention_bwd": tiles.RDNA3_ATTENTION_BWD,
}
_RDNA4 = {
    "gemm": tiles.RDNA4_GEMM,
    "gemv": tiles.RDNA_GEMV,
    "attention": tiles.RDNA4_ATTENTION,
    "attention_decode": tiles.RDNA_DECODE,
    "attention_bwd": tiles.RDNA4_ATTENTION_BWD,
}
_CU_MODE = ("-mcumode",)
"""On RDNA a block stays on one compute unit: its waves share that unit's LDS and caches."""
_OPTIONS = ("-std=c++17", "-O3", "-fgpu-inline-threshold=1000000")
"""A function that is not inlined would take its arrays out of registers."""

ROWS = {
    r.arch: r
    for r in (
        _row("gfx90a", 64, 4, 65536, 512, 32, _MFMA16 | _FLUSHES, _GFX90A),
        _row("gfx942", 64, 4, 65536, 512, 32, _MFMA16 | _XF32, _CDNA),
        _row("gfx950", 64, 4, 163840, 512, 64, _MFMA32, _CDNA4),
        _row("gfx1100", 32, 2, 65536, 256, 32, _WMMA11, _RDNA3, _CU_MODE),
        _row("gfx1151", 32, 2, 65536, 256, 32, _WMMA11, _RDNA3, _CU_MODE),
        _row("gfx1200", 32, 2, 65536, 256, 32, _WMMA12, _RDNA4, _CU_MODE),
        _row("gfx1201", 32, 2, 65536, 256, 32, _WMMA12, _RDNA4, _CU_MODE),
    )
}


COSTS = dict.fromkeys(ROWS, ESTIMATED)


def row(arch: str) -> ArchRow:
    """The arch's row; raises UnknownName with those there are."""
    return of_arch(ROWS, arch, "Name one of these, or add a row to kernelseam_rocm.archs")
