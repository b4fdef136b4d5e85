"""How Hopper's GEMM kernels cut a product: tiles of C, their order, slices of K."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kernelseam.contract import Device, Launches
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import HALVES
from kernelseam.kernels.elements import divide_up, divider_parameter, divider_values
from kernelseam.kernels.gemm.reductions import Strips, fits_strips, refuse_parts
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import most

from kernelseam_cuda.sm90.tf32_tiles import HopperTf32Tile
from kernelseam_cuda.sm90.tiles import (
    AT_ONCE,
    E4M3,
    E4M3_BLOCKS,
    EPILOGUE,
    EPILOGUE_LINEAR,
    FEW_LOADED,
    FEW_ROWS,
    GEMM,
    LONG_SPLIT,
    ONE_WAVE,
    PANEL,
    PING_PONG,
    SPLIT,
    HopperGemmTile,
)

SCALED_COLUMNS = 64
"""Of a tile, that share a scale where scales are of blocks."""
SLICE_BYTES = 128
"""Bytes of a row of A or B along K in one pipeline stage."""
FEWEST_STAGES = 2
"""Of a ring."""
TAIL_SLICES, _MOST_WAVES = 16, 8
"""Of a part into which a tile of a last wave is cut, at least, and waves behind which there is less
to gain. (H200, µs, cut and the best tile whole: 3717×3392×7488 289 and 312, 1024×1024×16384 51 and
67.)"""
_MANY_WAVES, _MOST_SLICES = 4, 2**20
"""As in last_wave.h."""
_STRIP_ROWS = 64
"""Of a tile, that a consumer's warps have together."""
MAX_EXTENT = 2**30
"""Rows and columns: a tile's place, and its end, are 32-bit."""
MAX_TILES = 2**31 - 2**16
"""Tile indices are 32-bit, and a persistent block steps past the last one by the grid's size."""
ORDER = Structure(
    (
        *((n, divider_parameter(n)) for n in ("matrix", "group", "last", "heads")),
        ("rows", "i32"),
        ("total", "i32"),
    )
)


def grid_of_tiles(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> tuple[int, int]:
    """Rows and columns of tiles of one matrix, those of a cluster counted as one."""
    rows, columns = tile.bm, tile.bn
    if tile.shared_a:
        columns *= tile.cluster
    else:
        rows *= tile.cluster
    return -(-p.M // rows), -(-p.N // columns)


def tile_count(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> int:
    """Tiles of all matrices; those of a cluster count as one."""
    rows, columns = grid_of_tiles(p, tile)
    return rows * columns * p.results


def results_of(p: GemmProblem) -> tuple[int, int]:
    """Heads and batch entries of C."""
    return p.num_heads // p.c_head_group, p.batch // p.c_batch_group


def order_values(p: GemmProblem, tile: HopperGemmTile | HopperTf32Tile) -> dict[str, int]:
    """Arguments of tiles.h's TileScheduler, and the divider of B's heads."""
    rows, columns = grid_of_tiles(p, tile)
    dividers = {
        "matrix": rows * columns,
        "group": tile.group_rows * columns,
        "last": most(rows % tile.group_rows, 1),
        "heads": results_of(p)[0],
        "b_heads": p.b_head_group,
    }
    values = {"rows": rows, "total": tile_count(p, tile)}
    for name, d in dividers.items():
        values |= divider_values(name, d)
    return values


def result_dtypes(dtype: DType) -> tuple[DType, ...]:
    """Dtypes of the result of products of a dtype."""
    if dtype.is_fp8:
        return DType.bfloat16, DType.float16, DType.float32, dtype
    return (dtype,) if dtype is DType.float32 else (dtype, DType.float32, DType.float8_e4m3fn)


def slice_of(spec: GemmSpec) -> int:
    """Elements of K in a stage of the ring."""
    return SLICE_BYTES // spec.dtype.itemsize


@lru_cache(512)
def tiles_of(spec: GemmSpec) -> tuple[HopperGemmTile, ...]:
    """The tiles of a spec."""
    return storing(spec, _tiles_of(spec))


def storing(spec: GemmSpec, tiles: tuple[HopperGemmTile, ...]) -> tuple[HopperGemmTile, ...]:
    """Of the tiles those that store such a result."""
    return tuple(t for t in tiles if _stores(spec, t)) if spec.dtype_c.is_fp8 else tiles


def _tiles_of(spec: GemmSpec) -> tuple[HopperGemmTile, ...]:
    if spec.scale_block:
        return E4M3_BLOCKS if spec.scale_block[1] % SCALED_COLUMNS == 0 else ()
    if spec.dtype.is_fp8:
        return E4M3
    if spec.joined == "a" and spec.summed:  # places of so many boxes do not fit the registers
        return tuple(t for t in GEMM if t.bm < 256)
    if spec.epilogue:
        linear = EPILOGUE_LINEAR + _with_tails(EPILOGUE + FEW_LOADED, spec)
        tiles = EPILOGUE + linear * _linear(spec)
        return tuple(
            form
            for t in tiles
            for form in _forms(spec, t)
            if takes_pairs(spec, t)
            and not (t in AT_ONCE and _ends_late(spec))
            and _stores_plainly(spec, t)
            and _fits_registers(spec, t)
            and fits_strips(spec, *_strip(spec, t))
            and t.fits(spec.bias is not None, kept=kept_bytes(spec, t))
        )
    linear = (
        *AT_ONCE,
        *SPLIT,
        *LONG_SPLIT,
        *ONE_WAVE,
        *FEW_ROWS,
        *FEW_LOADED,
        PING_PONG,
        *_with_tails(GEMM + FEW_LOADED, spec),
    )
    tiles = GEMM + linear * _linear(spec)
    return tuple(t for t in tiles if _fits_registers(spec, t) and _stores_plainly(spec, t))


def _stores_plainly(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Tiles of one wave: B lies along K, as their last panel of columns may be a part of one, and
    nothing but a bias and an activation becomes of 16-bit results."""
    more = (spec.residual, spec.pairs, spec.reductions, spec.preactivation, spec.segmented)
    plain = spec.b_transposed and spec.dtype_c.itemsize == 2 and not (any(more) or spec.joined)
    return plain or tile not in ONE_WAVE


def _with_tails(tiles: tuple[HopperGemmTile, ...], spec: GemmSpec) -> tuple[HopperGemmTile, ...]:
    """Those whose last wave may be cut along K. (Of 128×64 whole ones were as fast.)"""
    best = (t for t in tiles if t.store == "tma" and (t.bm, t.bn, t.cluster) == (128, 128, 1))
    small = (t for t in tiles if t.blocks == 2 and t.split == 1)
    return tuple(replace(t, tail_slices=TAIL_SLICES) for t in (*best, *small))


def _forms(spec: GemmSpec, tile: HopperGemmTile) -> tuple[HopperGemmTile, ...]:
    """Where all tiles run at once, their launch may add up parts itself; those that are cut have
    no other way."""
    if not spec.reductions or tile.ping_pong:
        return (tile,)
    adds_up = replace(tile, adds_up=True)
    return (adds_up,) if tile.tail_slices else (adds_up, tile)


def takes_pairs(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether a tile takes an epilogue's pairs of columns. The result is half as wide; a B along N
    is loaded by panels, each of one half."""
    if spec.pairs == HALVES and not spec.b_transposed and tile.bn // 2 % PANEL:
        return False
    return not spec.pairs or _stores(spec, tile)


def _fits_registers(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether a consumer of 128×192 has registers for what is loaded or stored beside its 192
    sums."""
    if not tile.ping_pong:
        return True
    if spec.segmented or spec.joined:
        return False
    if expression := spec.epilogue_structure:
        loads = "load" in expression.operations
        added = (spec.bias, spec.residual, spec.preactivation, spec.pairs)
        return not loads and sum(map(bool, added)) < (3 if spec.residual is None else 2)
    return not spec.residual


def _ends_late(spec: GemmSpec) -> bool:
    """Whether warps that compute so much, or join and add up sums, should leave a result's rows to
    TMA. (H200, 512×6144×4096 by 128×192, µs stored by warps and by TMA: without an epilogue 38.9
    and 39.5, gelu 41.4 and 40.7, with a second result 42.6 and 42.0, silu with one 42.5 and 41.6,
    with squares of rows 43.5 and 42.9.)"""
    expression = spec.epilogue_structure
    if expression is None or spec.pairs:
        return False
    return bool(spec.reductions) or spec.preactivation or "ndtr" in expression.operations


def strips_of(p: GemmProblem, tile: HopperGemmTile) -> Strips:
    """What the parts of sums and maxima in an epilogue are of (sm90/gemm/reductions.h)."""
    high, wide = _strip(p.spec, tile)
    return Strips(high, wide, divide_up(p.M, high), divide_up(p.c_columns, wide))


def _strip(spec: GemmSpec, tile: HopperGemmTile) -> tuple[int, int]:
    blocks = any(r.columns > 1 for r in spec.reductions)  # a number is of a block's columns
    return _STRIP_ROWS, _kept_columns(spec, tile) if blocks else _columns(spec, tile)


def _kept_columns(spec: GemmSpec, tile: HopperGemmTile) -> int:
    return PANEL if _columns(spec, tile) % PANEL == 0 else PANEL // 2


def kept_bytes(spec: GemmSpec, tile: HopperGemmTile) -> int:
    """Of shared memory, in which a consumer's warps join parts of columns and of strips."""
    kept = sum(
        _kept_columns(spec, tile) if r.columns == 1 else 1 for r in spec.reductions if r.rows != 1
    )
    consumers = 1 if tile.ping_pong else tile.groups
    return 16 * tile.groups * kept * (tile.bm // (_STRIP_ROWS * consumers))


def refuse_reductions(p: GemmProblem) -> str | None:
    """Why sums and maxima in an epilogue are not taken."""
    if not p.spec.reductions:
        return None
    if not (tiles := tiles_of(p.spec)):
        return "no tile's strips of 64 rows are of blocks that sums and maxima are of"
    return refuse_parts(p, (strips_of(p, t) for t in tiles))


def box_bytes(spec: GemmSpec, tile: HopperGemmTile) -> int:
    """Of a row of the result in a box that TMA stores: a panel's; half of them where a tile's last
    panel is half a one; or those of the whole tile, as a gate's of 8 bits, 96."""
    columns = _columns(spec, tile) * spec.dtype_c.itemsize
    if tile.store == "rows" or columns % SLICE_BYTES == 0:
        return SLICE_BYTES
    return SLICE_BYTES // 2 if columns % (SLICE_BYTES // 2) == 0 else columns


def _columns(spec: GemmSpec, tile: HopperGemmTile) -> int:
    """Of the result, in a tile."""
    return tile.bn // (2 if spec.pairs else 1)


def _stores(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether a tile stores results of a dtype: TMA in boxes of whole or half panels, or of less
    than a panel."""
    columns = _columns(spec, tile) * spec.dtype_c.itemsize
    return tile.store == "rows" or columns < SLICE_BYTES or columns % (SLICE_BYTES // 2) == 0


def _linear(spec: GemmSpec) -> bool:
    """Whether it is a linear layer's product, or that of its input's gradient: rows of A are
    tokens, nothing else is summed, and the result is of 16 bits or fewer."""
    plain = not (spec.a_transposed or spec.summed or spec.row_sums)
    return plain and spec.view == "strided" and spec.dtype_c.itemsize <= 2


def all_at_once(p: GemmProblem, tile: HopperGemmTile, device: Device) -> bool:
    """Whether all tiles run at once."""
    clusters = device.limits.compute_units // (tile.cluster * tile.split) * tile.blocks
    return tile_count(p, tile) <= clusters


class LastWave(NamedTuple):
    """How tiles are cut along K: see last_wave.h."""

    waves: int
    """Of those before."""
    slices: int
    """That a block has of what is cut."""
    others: int
    """Blocks whose sums the block of a tile's last part adds up, at most."""


def last_wave(p: GemmProblem, tile: HopperGemmTile, device: Device) -> LastWave | None:
    """None: it is not cut."""
    blocks = max(device.limits.compute_units // tile.cluster, 1) * tile.blocks
    fewest, slices = tile.tail_slices, divide_up(p.K, slice_of(p.spec))
    waves, rest = divmod(tile_count(p, tile), blocks)
    if not rest or waves >= _MOST_WAVES or slices > _MOST_SLICES:
        return None
    if (parts := min(blocks // rest, slices // fewest)) > 1:
        each = divide_up(slices, parts)
        return LastWave(waves, each, divide_up(slices, each) - 1)
    if slices < fewest or (waves < _MANY_WAVES and grid_of_tiles(p, tile)[0] > 1):
        return None
    each = most(divide_up(rest * slices, blocks), fewest)
    return LastWave(waves, each, divide_up(slices, each)) if each < slices else None


def in_step(p: GemmProblem, tile: HopperGemmTile) -> HopperGemmTile:
    """A ring from which a block cannot load more than a slice of its next tile, where the L2 cache
    is full of C's lines that memory has yet to take: A and B stay there for as long as blocks read
    them at nearly the same time. H100, 256 × 2048×2048×128: 739 MB of reads become 268. Ends
    count half, as fitted to K = 64, where it is faster than the tile whose warps store."""
    stages = max(divide_up(p.K, slice_of(p.spec)) * p.summed + 1, FEWEST_STAGES)
    if not tile.mostly_c or stages >= tile.stages:
        return tile
    return replace(tile, stages=stages, block_seconds=tile.block_seconds / 2)


def with_tail_sums(launches: Launches, tile: HopperGemmTile, blocks: int) -> Launches:
    """One launch of so many blocks whose workspace is left 0, and what cut tiles need: a word for
    each consumer, which is left 0, too, and the sums of a tile for each block."""
    (own,) = launches.kernels
    words = divide_up(launches.zeroed_bytes, 256) * 256
    sums = words + divide_up(4 * blocks * tile.groups, 256) * 256
    own = replace(own, workspace={**own.workspace, "origin": words, "sums": sums})
    return Launches((own,), sums + blocks * tile.a_rows * tile.bn * 4, zeroed_bytes=sums)


def refuse_extents(p: GemmProblem) -> str | None:
    """Why a problem is too small or too large."""
    if not (p.M and p.N and p.results and p.reads_inputs):
        return "there is nothing to multiply"
    for name, n in (("M", p.M), ("N", p.N)):
        if n >= MAX_EXTENT:
            return f"{name} = {n}: it takes less than 2**30"
    return None
