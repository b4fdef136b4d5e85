"""How many tiles a launch of cuda_kernels/sm90/attention/forward.h has, and which are scheduled
together: tiles.h has their order."""

from __future__ import annotations

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.frozen import dataclass
from kernelseam.kernels.elements import divide_up
from kernelseam.symbolic import least, most

from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile

_SECTION_BYTES = 8 << 20
"""Keys and values of the heads of a section, whose tiles are scheduled together: as much as stays
in the L2 cache beside the rest."""
_LAST_SECTION_TILES = 512
"""Tiles of the last section, about four a multiprocessor: enough short ones to fill the launch's
end. Twice as many where blocks are listed, whose numbers fall more slowly."""
_LAST_SECTION_BYTES, _LAST_SECTION_HEADS = 32 << 20, 16
"""No more of its keys and values, or of its heads, whichever is more heads, where blocks ask late
for tiles, so that they end together with fewer of them."""


@dataclass(frozen=True)
class TileCount:
    """The number of a launch's tiles. Where keys are in parts, ``total`` counts none of these."""

    q_tiles: int
    total: int
    section: int
    last_section: int


def tile_count(p: AttentionProblem, tile: HopperAttentionTile) -> TileCount:
    """Sections of heads whose keys and values fit into a part of L2, and no fewer than the
    tile's."""
    q_tiles = divide_up(p.S_q * tile.group_heads, tile.rows)
    heads, group = p.batch * p.num_heads // tile.group_heads, p.head_group // tile.group_heads
    head_bytes = p.S_k * (p.spec.head_dim + p.spec.value_dim) * p.spec.kv.itemsize
    section = least(most(tile.fewest_heads, _SECTION_BYTES // head_bytes) * group, heads)
    last_heads = _LAST_SECTION_TILES * (2 if tile.follows else 1) // q_tiles
    if tile.late:
        cached = most(_LAST_SECTION_BYTES // head_bytes, _LAST_SECTION_HEADS)
        last_heads = least(last_heads, cached)
    last = least(most(section, last_heads * group), heads)
    return TileCount(q_tiles, q_tiles * heads, section, last)
