"""Cost model of cuda_kernels/sm90/gemm/gemm.h, calibrated on an H200."""

from __future__ import annotations

from kernelseam.contract import Device
from kernelseam.costs import Work
from kernelseam.descriptors.common.lists import LINE
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.kernels.gemm.cost import end_bytes, same_lines_seconds

from kernelseam_cuda.sm90.gemm_tiling import SLICE_BYTES, grid_of_tiles, last_wave, slice_of
from kernelseam_cuda.sm90.tiles import HopperGemmTile

_SLICE = 64
"""Elements of K in a slice of 128 bytes of half precision; a slice of TF32, of half as many, or of
e4m3, of twice as many, takes as long."""
_MOSTLY_C = 0.75
"""Above this part of the bytes moved C is stored with the L2 policy evict-first. H200:
256 × 2048×2048×128, C 0.89 of them, gains 4 %; 256 × 2048×128×2048, 0.06, would lose 8 %."""
_LINE_OPERATIONS = 6_400
"""What a block at full rate could do while a line of the L2 cache comes (H200: 1.2 ns). Where rows
are not whole lines, a panel's row of 128 bytes lies in two. So it does where matrices of a list
begin within a line: 64 × 1024³ takes 243 µs by pairs that share B and 370 by the tile that is as
fast where they do not (210)."""
_ENDS = {"rows": 1.1, "tma": 2.55}
"""What a line of C that is written in part costs, in whole ones: warps store 256 bytes of a row,
TMA stores 128 (H200: 256 × 2048×2048×128 where matrices of a list begin with a line, or do not: by
128×128 707 and 1630 µs by TMA and 1008 and 1444 by rows, by pairs of 128×256 747 and 1288)."""
_SHARED_OPERATIONS = 2_100
"""That a block could do meanwhile, where another reads the same lines of A as it does: the cache
serves them one after the other (H200: 0.4 ns, by 220 random problems; with 1.4 ns 56×15936×4992 by
64×64 were predicted to take 81 µs, and take 48.8). It bounds products of few rows with many
columns, but not of e4m3: 64×6144×4096 takes 8.3 µs by 96 blocks, 8192³ by 16384 1.78 ms."""


_OPERATION_SECONDS = (
    {"load": 1.8e-10, "tanh": 4e-10, "softcap": 4e-10, "sigmoid": 5e-11, "ndtr": 6e-11}
    | dict.fromkeys(("exp", "exp2"), 5e-11)
    | dict.fromkeys(("erf", "log", "log2", "log1p", "pow", "sin", "cos", "div"), 1e-10)
)
"""Of an epilogue, for an element of the result, where nothing hides it (H100: 512×6144×4096 by
128×192, 36.3 µs without one, takes 37.1 with silu, 37.7 with gelu by a sigmoid, 38.8 with gelu;
16384×6144×4096 by 128×256, 1137 with silu, 1280 with silu and a matrix that it loads)."""
_PLAIN_OPERATION_SECONDS = 8e-12
_SUM_SECONDS = {"rows": 4e-11, "columns": 1.2e-10, "strips": 7e-11}
"""Of a sum or a maximum beside, for an element: those of rows are kept by threads, others joined by
the consumer's warps (H200, 16384×6144×4096, over an epilogue alone: squares of rows 26 µs by
128×192 without turns and 41 by 128×256, sums of columns 77 and 124, a maximum of all 45 and 76, in
31 and 23 tiles one after the other)."""


def _epilogue_seconds(p: GemmProblem, tile: HopperGemmTile) -> float:
    """What a tile's epilogue takes, which nothing hides but another consumer's products."""
    expression = p.spec.epilogue_structure
    if expression is None:
        return 0.0
    each = sum(
        count * _OPERATION_SECONDS.get(name, _PLAIN_OPERATION_SECONDS)
        for name, count in expression.operations.items()
    )
    for r in p.spec.reductions:
        each += _SUM_SECONDS["rows" if r.rows == 1 else "columns" if r.columns == 1 else "strips"]
    columns = tile.bn // (2 if expression.pairs else 1)
    return tile.bm * columns * each / tile.blocks


_END_SECONDS = 2e-6
"""Of a tile of 128×192 that one consumer writes alone, beside its epilogue (H200, 156 random
problems: 1.2 µs a tile of one slice, where two write one after the other, 2.9 of a single tile)."""
_FEW_ROWS_OVERLAP = 4.0
"""The norm of compute and memory time where a ring holds little but B (H200, 140 times of 47 random
problems of up to 32 rows: within a tenth)."""
_TAIL_SECONDS, _OTHER_SECONDS, _TAIL_RATE, _L2_RATE = 1e-6, 4e-7, 1e11, 7.5e12
"""Of tiles of a last wave that are cut along K: by consumers of a block, until other blocks' sums
are there; of each of these blocks; the bytes of sums that a block adds up in a second, and those of
A and B that L2 delivers to blocks at different slices. (H200, µs: 568×1920×7040 by 128×128, 270 MB,
37 whole and 40 cut; 261×1152×5248 by 64×64, 118 MB, 15 and 22.)"""
_BLOCK_RATE = 4.65e12
"""Operations in a second of an H200's block at full rate."""


def mostly_c(p: GemmProblem) -> bool:
    """Whether writes of C are most of the traffic, so that it is stored with evict-first."""
    columns = p.c_columns + p.N * p.spec.preactivation
    c_bytes = p.results * p.M * columns * p.spec.dtype_c.itemsize
    return c_bytes > _MOSTLY_C * p.bytes_moved


def work(p: GemmProblem, tile: HopperGemmTile, device: Device) -> Work:
    """Bytes, blocks and operations of a product by a tile."""
    units = max(device.limits.compute_units, 1)
    rows, columns = grid_of_tiles(p, tile)
    size = p.spec.dtype.itemsize
    rate = (p.spec.a_transposed and tile.rate_along_m) or tile.rate
    loaded = tile.bm, tile.bn // tile.cluster
    if tile.shared_a:
        loaded = tile.bm // tile.cluster, tile.bn
    scattered = p.spec.view == "pointers" and not p.whole_lines
    steps = p.a_strides[2], p.b_strides[2]
    lines = sum(
        [
            min(n, extent) * (2 if scattered or step * size % LINE else 1)
            for n, extent, step in zip(loaded, (p.M, p.N), steps, strict=True)
        ]
    )
    slice_operations = max(
        2.0 * tile.bm * tile.bn * _SLICE,
        _LINE_OPERATIONS * rate * lines,
        _SHARED_OPERATIONS * columns / tile.split * (not p.spec.dtype.is_fp8),
    )
    blocks = rows * tile.cluster * columns * p.results * tile.split
    waves = max(-(-blocks // units), 1)
    slices = -(-p.K // slice_of(p.spec) // tile.split) * p.summed
    operations, seconds = slice_operations * slices, tile.block_seconds + tile.start_seconds / waves
    end = _epilogue_seconds(p, tile)
    if tile.tail_slices and (cut := last_wave(p, tile, device)):
        slice_bytes = SLICE_BYTES * (min(tile.bm, p.M) + min(tile.bn, p.N))
        moved = slice_bytes * slices * (blocks - cut.waves * units * tile.blocks)
        delivered = rate * _BLOCK_RATE * moved / (_L2_RATE * tile.blocks)
        part = max(operations * cut.slices / slices, delivered)
        operations = tile.blocks * (cut.waves * operations + part) / waves
        other = _OTHER_SECONDS + tile.a_rows * tile.bn * 4 / _TAIL_RATE
        seconds += (_TAIL_SECONDS * tile.groups + cut.others * other) / waves
    if tile.ping_pong:  # the other's products hide it, if they take as long; nothing the last one
        end += _END_SECONDS
        operations += max(rate * _BLOCK_RATE * end - operations, 0.0) / 2
        end /= waves
    return Work(
        p.bytes_moved + round(_ENDS[tile.store] * end_bytes(p, tile.bn)),
        blocks,
        operations,
        dtype=DType.bfloat16,
        rate=rate,
        block_seconds=seconds + end,
        alone=same_lines_seconds(p, tile.bn * (tile.cluster if tile.shared_a else 1)),
        overlap=_FEW_ROWS_OVERLAP if tile.few_rows else 2.0,
    )
