"""How Hopper's GEMM kernels cut a product: tiles of C, their order, slices of K."""

from __future__ import annotations

from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.epilogues import HALVES
from kernelseam.kernels.elements import divide_up, divider_parameter, divider_values
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import most

from kernelseam_cuda.sm90.tiles import (
    AT_ONCE,
    E4M3,
    E4M3_BLOCKS,
    EPILOGUE,
    EPILOGUE_LINEAR,
    FEW_ROWS,
    GEMM,
    PANEL,
    PING_PONG,
    SPLIT,
    HopperGemmTile,
    HopperTf32Tile,
)

SCALED_COLUMNS = 64
"""Of a tile, that share a scale where scales are of blocks."""
SLICE_BYTES = 128
"""Bytes of a row of A or B along K in one pipeline stage."""
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
    if tile.shared_a:
        return divide_up(p.M, tile.bm), divide_up(p.N, tile.bn * tile.cluster)
    return divide_up(p.M, tile.bm * tile.cluster), divide_up(p.N, tile.bn)


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
        tiles = EPILOGUE + (EPILOGUE_LINEAR if _linear(spec) else ())
        return tuple(t for t in tiles if takes_pairs(spec, t) and _fits_registers(spec, t))
    tiles = GEMM + ((*AT_ONCE, *SPLIT, *FEW_ROWS, PING_PONG) if _linear(spec) else ())
    return tuple(t for t in tiles if _fits_registers(spec, t))


def takes_pairs(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether a tile takes an epilogue's pairs of columns. The result is half as wide: TMA stores
    whole panels of it, or of halves half ones, too; and a B along N is loaded by panels."""
    if not spec.pairs:
        return True
    columns = tile.bn // 2
    if spec.pairs == HALVES:
        return columns % (PANEL // 2 if spec.b_transposed else PANEL) == 0
    return columns % (SLICE_BYTES // spec.dtype_c.itemsize) == 0 or tile.store == "rows"


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


def half_panels(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether TMA stores the result in boxes of half panels, as a tile's last panel is half a one:
    of pairs, or of 8 bits."""
    panel = SLICE_BYTES // spec.dtype_c.itemsize
    return tile.store == "tma" and _columns(spec, tile) % panel != 0


def _columns(spec: GemmSpec, tile: HopperGemmTile) -> int:
    """Of the result, in a tile."""
    return tile.bn // (2 if spec.pairs else 1)


def _stores(spec: GemmSpec, tile: HopperGemmTile) -> bool:
    """Whether a tile stores results of a dtype: TMA in boxes of whole or half panels."""
    half = SLICE_BYTES // spec.dtype_c.itemsize // 2
    return tile.store == "rows" or _columns(spec, tile) % half == 0


def _linear(spec: GemmSpec) -> bool:
    """Whether it is a linear layer's product, or that of its input's gradient: rows of A are
    tokens, nothing else is summed, and the result is of 16 bits or fewer."""
    plain = not (spec.a_transposed or spec.summed or spec.row_sums)
    return plain and spec.view == "strided" and spec.dtype_c.itemsize <= 2
