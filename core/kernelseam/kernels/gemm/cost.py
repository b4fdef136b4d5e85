"""The work of a batched GEMM with a tile."""

from __future__ import annotations

from kernelseam.contract import Device
from kernelseam.costs import Work
from kernelseam.descriptors.common.lists import LINE
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.tile import GemmTile

NARROW = 0.45
"""Fraction of a tile's rate where rows are read or written element by element."""
LIST_SECONDS = 6e-7
"""Added for a tile whose matrices are given by a list of addresses: a load before the first load,
which the other blocks of a compute unit hide in part (H200: 384 × 512×512×64, two blocks a unit,
take 83.5 µs where strides take 75.1)."""
START_SECONDS = 1e-7
"""What nothing hides of the first blocks' start and the last ones' end."""
EDGE = 32
"""The overhead of a tile whose rate was not measured (loads and starting), as rows and columns."""


def estimated_rate(bm: int, bn: int, teams: int) -> float:
    """The rate of a tile that was not measured: its area over area and overhead. Teams share no
    loads; their warps hide half of each other's latency."""
    return bm * bn / (bm * bn + EDGE * (bm + bn)) * 2 * teams / (teams + 1)


def end_bytes(p: GemmProblem, columns: int) -> int:
    """Bytes of the lines of C that two tiles of so many columns write, where the matrices of a list
    may begin anywhere within one: each writes a part, at its own time."""
    if p.spec.view != "pointers" or p.whole_lines:
        return 0
    tiles = divide_up(p.N, columns)
    return LINE * tiles * p.M * p.results if tiles > 1 else 0


_SAME_LINES_SECONDS, _SAME_ROWS = 1.6e-8, 128


def same_lines_seconds(p: GemmProblem, columns: int) -> float:
    """Of a thin product whose tiles have so many columns: what L2 takes to serve the same few lines
    of A to one tile after the other, twice as long from 129 rows on. (H200, halves, µs: 24×38464×24
    8.4 by 301 tiles of Hopper's 128×128, 14.4 by 601 of 128×64, 11.8 by 1202 of the shared kernel's
    32×32, cuBLAS 3.9; 129×28072×24 10.4 by 440 of 128×128, cuBLAS 5.7.)"""
    if p.K * p.spec.dtype.itemsize > LINE:
        return 0.0
    return divide_up(p.N, columns) * min(divide_up(p.M, _SAME_ROWS), 2) * _SAME_LINES_SECONDS


def gemm_work(p: GemmProblem, tile: GemmTile, device: Device) -> Work:
    """A block is a team's tile, times the teams."""
    spec, k = p.spec, divide_up(p.K, tile.bk) * tile.bk if p.reads_inputs else 0
    units = max(device.limits.compute_units, 1)
    narrow = min(spec.vector_a, spec.vector_b, spec.vector_c) < 16
    rate = tile.rate or estimated_rate(tile.bm, tile.bn, tile.teams)
    start = tile.block_seconds + (
        LIST_SECONDS / tile.min_blocks if spec.view == "pointers" else 0.0
    )
    return Work(
        p.bytes_moved + end_bytes(p, tile.bn),
        tile.blocks(p),
        2.0 * tile.bm * tile.bn * k * p.summed * tile.teams,
        dtype=spec.dtype,
        rate=rate * (NARROW if narrow else 1.0),
        block_seconds=start + START_SECONDS / max(divide_up(tile.blocks(p), units), 1),
        alone=max(
            k * p.summed / tile.bk * tile.slice_seconds / max(tile.stages - 1, 1),
            same_lines_seconds(p, tile.bn) / 2,
        ),
    )
