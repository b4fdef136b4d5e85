"""How large latent attention's list of work is (cuda_kernels/sm90/attention/latent_list.h), from a
problem's numbers alone."""

from __future__ import annotations

from kernelseam.contract import Device
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.elements import divide_up
from kernelseam.symbolic import least, most, recorded

from kernelseam_cuda.sm90.latent_tiles import HopperLatentTile

_MOST_TOGETHER = 4
"""Blocks that take the tiles of rows of an item side by side."""
_FEWEST_TAKEN = 0.9
"""Of the tiles of rows that blocks side by side may take: the others wait."""
_RAGGED = 4
"""Where the longest of packed sequences has more than so many times the queries of the mean, most
are taken to be short."""


def row_tiles_of(p: AttentionProblem, tile: HopperLatentTile) -> int:
    """Of all entries: queries with their heads. Where they are packed, not less than there are."""
    of_entry = divide_up(p.S_q * p.head_group, tile.rows)
    if p.spec.q_view != "packed":
        return p.batch * p.kv_heads * of_entry
    # An entry ends within a tile.
    packed = least(p.total_q * p.head_group // tile.rows + p.batch, p.batch * of_entry)
    return p.kv_heads * packed


def together_of(p: AttentionProblem, tile: HopperLatentTile) -> int:
    """Tiles of rows that as many blocks take side by side, over the same keys: each key then comes
    from memory once for all of them."""
    return _side_by_side(
        p.S_q * p.head_group, p.head_group, tile.rows, p.batch * p.S_q, _queries(p)
    )


@recorded
def _side_by_side(longest: int, heads: int, tile_rows: int, room: int, queries: int) -> int:
    """Of the longest entry's tiles of rows, if entries are about as long; else of a query's."""
    rows = longest if room <= _RAGGED * queries else heads
    tiles = divide_up(rows, tile_rows)
    counts = range(1, _MOST_TOGETHER + 1)
    return max(n for n in counts if tiles >= _FEWEST_TAKEN * n * divide_up(tiles, n))


def _queries(p: AttentionProblem) -> int:
    return p.total_q if p.spec.q_view == "packed" else p.batch * p.S_q


def _items(p: AttentionProblem, tile: HopperLatentTile) -> int:
    """Not less than there are."""
    together = together_of(p, tile)
    if p.spec.q_view != "packed":
        rows = divide_up(p.S_q * p.head_group, tile.rows * together)
        return p.batch * p.kv_heads * rows
    return divide_up(row_tiles_of(p, tile), together) + p.batch * p.kv_heads


def groups_of(p: AttentionProblem, tile: HopperLatentTile, device: Device) -> int:
    """Of blocks that share the items; no more than there can be work for."""
    fewest = tile.item_cost + 2
    units = max(device.limits.compute_units // together_of(p, tile), 1)
    return least(units, most(places_of(p, tile) // fewest, 1))


def places_of(p: AttentionProblem, tile: HopperLatentTile) -> int:
    """Of the kernel's list, where every sequence is as long as it can be."""
    return _items(p, tile) * (max(divide_up(p.S_k, tile.bn), 1) + tile.item_cost)
