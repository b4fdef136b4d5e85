"""How Hopper's GEMM kernels cut a product: tiles of C, their order, slices of K."""

from __future__ import annotations

from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.kernels.elements import divide_up, divider_parameter, divider_values
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import most

from kernelseam_cuda.sm90.tiles import HopperGemmTile, HopperTf32Tile

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


def slice_of(spec: GemmSpec) -> int:
    """Elements of K in a stage of the ring."""
    return SLICE_BYTES // spec.dtype.itemsize
