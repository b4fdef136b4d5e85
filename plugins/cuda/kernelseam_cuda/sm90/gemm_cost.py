"""Cost model of cuda_kernels/sm90/gemm/gemm.h, calibrated on an H200."""

from __future__ import annotations

from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import divide_up

from kernelseam_cuda.sm90.gemm_tiling import grid_of_tiles, slice_of
from kernelseam_cuda.sm90.tiles import HopperGemmTile

_SLICE = 64
"""Elements of K in a slice of 128 bytes of half precision; a slice of TF32, of half as many, or of
e4m3, of twice as many, takes as long."""
_MOSTLY_C = 0.75
"""Above this part of the bytes moved C is stored with the L2 policy evict-first. H200:
256 × 2048×2048×128, C 0.89 of them, gains 4 %; 256 × 2048×128×2048, 0.06, would lose 8 %."""
_LINE, _LINE_OPERATIONS = 128, 7_000
"""Bytes of a line of the L2 cache; what a block at full rate could do while one comes (H200: 1.4
ns). Where rows are not whole lines, a panel's row of 128 bytes lies in two."""
_LISTED = 1.25
"""Lines of such a row in a list, whose matrices may begin anywhere within a line. Where they do,
64 × 1024³ takes 243 µs by pairs that share B and 370 by the tile that is as fast where they do not
(210); where C is most of what is moved, its stores decide."""
_SHARED_OPERATIONS = 15_000
"""That a block could do meanwhile, where another reads the same lines of A as it does: the cache
serves them one after the other (H200: 3 ns). It bounds products of few rows with many columns, but
not of e4m3: 64×6144×4096 takes 8.3 µs by 96 blocks, 8192³ by 16384 1.78 ms."""


def mostly_c(p: GemmProblem) -> bool:
    """Whether writes of C are most of the traffic, so that it is stored with evict-first."""
    c_bytes = p.results * p.M * p.N * p.spec.dtype_c.itemsize
    return c_bytes > _MOSTLY_C * p.bytes_moved


def work(p: GemmProblem, tile: HopperGemmTile) -> Work:
    """Bytes, blocks and operations of a product by a tile."""
    rows, columns = grid_of_tiles(p, tile)
    size = p.spec.dtype.itemsize
    rate = (p.spec.a_transposed and tile.rate_along_m) or tile.rate
    loaded = tile.bm, tile.bn // tile.cluster
    if tile.shared_a:
        loaded = tile.bm // tile.cluster, tile.bn
    whole = _LISTED if p.spec.view == "pointers" and not tile.c_first else 1
    lines = sum(
        n * (2 if row * size % _LINE else whole)
        for n, row in zip(loaded, (p.a_strides[2], p.b_strides[2]), strict=True)
    )
    slice_operations = max(
        2.0 * tile.bm * tile.bn * _SLICE,
        _LINE_OPERATIONS * rate * lines,
        _SHARED_OPERATIONS * columns / tile.split * (not p.spec.dtype.stored),
    )
    return Work(
        p.bytes_moved,
        rows * tile.cluster * columns * p.results * tile.split,
        slice_operations * divide_up(divide_up(p.K, slice_of(p.spec)), tile.split) * p.summed,
        dtype=DType.bfloat16,
        rate=rate,
        block_seconds=tile.block_seconds,
    )
