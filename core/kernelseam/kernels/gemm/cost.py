"""What a batched GEMM asks of a device with a tile."""

from __future__ import annotations

from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.kernels.elements import divide_up
from kernelseam.kernels.gemm.tile import GemmTile

NARROW = 0.45
"""Of a tile's rate where rows are read or written element by element."""
LIST_SECONDS = 6e-7
"""More for a tile whose matrices are found by a list, a load before the first load, which the other
blocks of a compute unit hide in part (H200: 384 × 512×512×64, two blocks a unit, take 83.5 µs where
strides take 75.1)."""
EDGE = 32
"""Rows and columns that a tile's two edges cost as much as, where nobody has measured its rate:
loads and starting."""


def estimated_rate(bm: int, bn: int, teams: int) -> float:
    """Of a tile that nobody has measured: its area beside what its edges cost. Teams share no
    loads; their warps hide half of each other's waits."""
    return bm * bn / (bm * bn + EDGE * (bm + bn)) * 2 * teams / (teams + 1)


def gemm_work(p: GemmProblem, tile: GemmTile) -> Work:
    """A block is a team's tile, times the teams."""
    spec, k = p.spec, divide_up(p.K, tile.bk) * tile.bk if p.reads_inputs else 0
    narrow = min(spec.vector_a, spec.vector_b, spec.vector_c) < 16
    rate = tile.rate or estimated_rate(tile.bm, tile.bn, tile.teams)
    start = tile.block_seconds + (
        LIST_SECONDS / tile.min_blocks if spec.view == "pointers" else 0.0
    )
    return Work(
        p.bytes_moved,
        tile.blocks(p),
        2.0 * tile.bm * tile.bn * k * p.summed * tile.teams,
        dtype=spec.dtype,
        rate=rate * (NARROW if narrow else 1.0),
        block_seconds=start,
    )
