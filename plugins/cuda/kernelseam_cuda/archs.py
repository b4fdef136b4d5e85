"""The table of archs: what shared kernels and dispatch need to know of each. A new arch is a row
here."""

from __future__ import annotations

from dataclasses import replace

from kernelseam.contract import ArchRow, Coefficients, LibraryRate, devices_of_sheets, of_arch
from kernelseam.dtypes import DType

from kernelseam_cuda.tiles import TURING, tiles

_KIB = 1024
OPTIONS = ("-std=c++17", "-default-device")
"""Of every compilation. As part of a row they are part of a binary's key."""

_HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
_HALF = LibraryRate(
    *(128, 0.67, 3.5e-7),
    few_rows=1.01,
    edge=3.2,
    step_seconds=1e-7,
    few_step_seconds=3.1e-8,
    few_seconds=2.7e-7,
    few_wave_seconds=1.2e-6,
    thin_seconds=3.2e-6,
    split_seconds=3.3e-6,
)
_SINGLE = LibraryRate(
    *(128, 0.99, 5.2e-7, 8e-7),
    tf32=6.0,
    few_rows=0.88,
    edge=17,
    step_seconds=8e-8,
    few_step_seconds=2e-8,
    few_seconds=4.2e-6,
    split_seconds=4.5e-6,
)
_LIBRARY = {
    DType.float16: _HALF,
    DType.bfloat16: _HALF,
    DType.float32: _SINGLE,
    DType.float64: LibraryRate(64, 0.92, 7.7e-7),
}
_LISTS = _LIBRARY | dict.fromkeys(
    (DType.float16, DType.bfloat16),
    LibraryRate(
        *(128, 0.65, 7.5e-7, 1.6e-7),
        few_rows=1.01,
        edge=0.8,
        step_seconds=7.5e-8,
        few_step_seconds=3.1e-8,
        thin_seconds=3e-6,
    ),
)
_LIBRARIES = {"cublas": _LIBRARY, "cublaslt": _LIBRARY, "cublas-batched": _LISTS}
HOPPER = Coefficients(
    "H200",
    bandwidth=0.87,
    multiply={DType.float16: 0.62, DType.bfloat16: 0.62, DType.float8_e4m3fn: 0.16},
    call_seconds=2.5e-7,
    libraries=_LIBRARIES,
)
"""A copy moves 4.27 of 4.92 TB/s. mma.sync issues at 0.62 of what wgmma reaches, so that a shared
kernel's tile cannot do better; libraries have wgmma. Of e4m3 it makes float16 first."""
_ESTIMATED = Coefficients(
    "estimated: the H200's parts", bandwidth=0.87, call_seconds=2.5e-7, libraries=_LIBRARIES
)
"""Where mma.sync is what there is, it issues at the peak; sm_100a and sm_103 were not measured."""
_BLACKWELL = {DType.float16: 0.3, DType.bfloat16: 0.3, DType.float8_e4m3fn: 0.08}
COSTS = {
    "sm_75": _ESTIMATED,
    "sm_80": _ESTIMATED,
    "sm_86": _ESTIMATED,
    "sm_89": _ESTIMATED,
    "sm_90a": HOPPER,
    "sm_100a": replace(_ESTIMATED, multiply=_BLACKWELL),
    "sm_103": replace(_ESTIMATED, multiply=_BLACKWELL),
    "sm_120": _ESTIMATED,
}
"""What is left of each arch's peaks. The H200's are fitted to ``benchmarks/results``; tests hold
them to it."""


MATRIX_DOUBLE = frozenset({"sm_80", "sm_90a", "sm_100a"})
"""Archs whose matrix units multiply float64; others have the instruction, and next to no units for
it."""
CONVERTS_E4M3 = frozenset({"sm_89", "sm_90a", "sm_100a", "sm_103", "sm_120"})
"""Archs with instructions that convert and multiply float8_e4m3fn: compute capability 8.9 and
later."""
CLUSTERED = frozenset({"sm_90a", "sm_100a", "sm_103", "sm_120"})
"""Archs with clusters, programmatic dependent launch and tensor maps: compute capability 9.0 and
later."""
BLACKWELL = frozenset({"sm_100a", "sm_103", "sm_120"})
"""Archs of compute capability 10.0 and later."""
LARGE_CACHE = frozenset({"sm_80", "sm_90a", "sm_100a", "sm_103"})
"""Archs whose devices have an L2 of 40 MB and more."""
_CLUSTER_BLOCKS = 8
"""Of a cluster that every such device can launch."""


def _rates(half: int, single: int, double: int, stored: int = 0) -> dict[DType, int]:
    rates = {
        DType.float16: half,
        DType.bfloat16: half,
        DType.float32: single,
        DType.float64: double,
    }
    return rates | ({DType.float8_e4m3fn: stored} if stored else {})


RATES = {
    "sm_75": _rates(1024, 128, 4),
    "sm_80": _rates(2048, 128, 128),
    "sm_86": _rates(1024, 256, 4),
    "sm_89": _rates(1024, 256, 4, 2048),
    "sm_90a": _rates(4096, 256, 256, 8192),
    "sm_100a": _rates(8192, 256, 128, 16384),
    "sm_103": _rates(8192, 256, 4, 16384),
    "sm_120": _rates(1024, 256, 4, 2048),
}
"""Dense operations of a multiprocessor in one clock: matrix units for half precision, for e4m3, and
for float64 where they multiply it; plain units else.

Source: the throughput table of the CUDA C++ Programming Guide and NVIDIA's architecture white
papers.
"""

PRODUCTS = {
    "sm_75": (
        ("NVIDIA T4", 40, 1590, 3.2e11, 16),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 1545, 6.16e11, 11),
    ),
    "sm_80": (
        ("NVIDIA A100-SXM4-80GB", 108, 1410, 2.039e12, 80),
        ("NVIDIA A100-SXM4-40GB", 108, 1410, 1.555e12, 40),
        ("NVIDIA A30", 56, 1440, 9.33e11, 24),
    ),
    "sm_86": (
        ("NVIDIA A10", 72, 1695, 6.0e11, 24),
        ("NVIDIA GeForce RTX 3090", 82, 1695, 9.36e11, 24),
        ("NVIDIA RTX A6000", 84, 1800, 7.68e11, 48),
    ),
    "sm_89": (
        ("NVIDIA L40S", 142, 2520, 8.64e11, 48),
        ("NVIDIA L4", 58, 2040, 3.0e11, 24),
        ("NVIDIA GeForce RTX 4090", 128, 2520, 1.008e12, 24),
    ),
    "sm_90a": (
        ("NVIDIA H200", 132, 1980, 4.8e12, 141),
        ("NVIDIA H100 SXM", 132, 1980, 3.35e12, 80),
        ("NVIDIA H100 PCIe", 114, 1755, 2.0e12, 80),
    ),
    "sm_100a": (("NVIDIA B200", 148, 1965, 8.0e12, 180),),
    "sm_103": (("NVIDIA B300", 160, 1920, 8.0e12, 288),),
    "sm_120": (
        ("NVIDIA GeForce RTX 5090", 170, 2407, 1.792e12, 32),
        ("NVIDIA RTX PRO 6000 Blackwell", 188, 2617, 1.792e12, 96),
    ),
}
"""Products of each arch, the first of which stands for it: name, multiprocessors, boost clock in
MHz, bytes of memory bandwidth in a second, GB of memory.

Source: NVIDIA's product pages and data sheets; the B300's units and clock are those that give its
peak rates.
"""
LAUNCH_SECONDS = 1.75e-6
"""From a kernel's end to the next one's first instruction, and its own first load (an H200's, in a
graph)."""


def _row(arch: str, shared_kib: int) -> ArchRow:
    clustered, doubles = arch in CLUSTERED, arch in MATRIX_DOUBLE
    halves = _HALF_PRECISION - {DType.bfloat16} if arch == "sm_75" else _HALF_PRECISION
    product, *others = devices_of_sheets(
        "cuda",
        arch,
        PRODUCTS[arch],
        RATES[arch],
        shared_bytes_per_block=shared_kib * _KIB,
        launch_seconds=LAUNCH_SECONDS,
    )
    stored = frozenset({DType.float8_e4m3fn} if arch in CONVERTS_E4M3 else ())
    return ArchRow(
        arch=arch,
        warp_size=32,
        shared_bytes_per_block=shared_kib * _KIB,
        registers_per_lane=255,
        platform="platform_nvidia.h",
        defines=(
            ("KS_MATRIX_DOUBLE", str(int(doubles))),
            *((("KS_E4M3", "1"),) if arch in CONVERTS_E4M3 else ()),
        ),
        matrix_dtypes=halves | stored | ({DType.float64} if doubles else set()),
        fp8_dtypes=stored,
        tiles=TURING
        if arch == "sm_75"
        else tiles(doubles, arch in CONVERTS_E4M3, arch in LARGE_CACHE, arch in BLACKWELL),
        options=OPTIONS,
        family=arch.replace("_", "").rstrip("a"),
        cluster_blocks=_CLUSTER_BLOCKS if clustered else 1,
        programmatic_launch=clustered,
        costs=COSTS[arch],
        product=product,
        more_products=tuple(others),
    )


ROWS = {
    r.arch: r
    for r in (
        _row("sm_75", 64),
        _row("sm_80", 163),
        _row("sm_86", 99),
        _row("sm_89", 99),
        _row("sm_90a", 227),
        _row("sm_100a", 227),
        _row("sm_103", 227),
        _row("sm_120", 99),
    )
}

BY_CAPABILITY = {
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
"""Compute capability → arch whose binaries it runs: its own, or an earlier one of the same major;
but archs with a letter are compiled for that one chip."""


def row(arch: str) -> ArchRow:
    """The arch's row; raises UnknownName with those there are."""
    return of_arch(ROWS, arch, "Name one of these, or add a row to kernelseam_cuda.archs")
