"""What cuda_kernels/sm90/attention/forward.h asks of a device, by which tiles are chosen."""

from __future__ import annotations

from math import ceil

from kernelseam.contract import Device
from kernelseam.costs import Work
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.cost import again_bytes, tile_keys
from kernelseam.kernels.attention.ragged import expected_tiles

from kernelseam_cuda.sm90.attention_blocks import element_rate
from kernelseam_cuda.sm90.attention_pages import COPIED_RATE
from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile

# Seconds are fitted to 290 random problems of one H200 (benchmarks/notes/choices.md).
GROUPED_SECONDS = 1.7e-6
"""Added to a tile whose rows are the heads of a group: its result leaves from registers. A
cluster's does so anyway."""
PAGES_SECONDS = 1.8e-6
"""Added, in place of that, where the producer first reads where pages are."""
PACKED_SECONDS, PACKED_BESIDE_PAGES = 2.5e-6, 9e-7
"""Added where it first reads where its sequence begins and ends, which pages hide in part."""
PARTS_SECONDS = 1.6e-6
"""Added to a part of a tile's keys, whose result is float32, where more parts than run at once hide
none of it (6 × 192 queries of 16 heads of 64 on 3,712 keys: 54.6 µs whole, 61.9 in four parts)."""
CLUSTER_SECONDS = 4.1e-6
"""Added where the parts of keys are a cluster's blocks: its start, and the merge."""


def forward_work(p: AttentionProblem, tile: HopperAttentionTile, device: Device) -> Work:
    """A tile's queries meet the keys visible to its middle one, and half a block and half a tile
    more; a part of the keys, its share in whole blocks."""
    keys, longest = tile_keys(p, tile.rows // tile.group_heads, tile.bn)
    if tile.parts > 1:
        keys, longest = (ceil(x / (tile.bn * tile.parts)) * tile.bn for x in (keys, longest))
    step = 2.0 * tile.bm * tile.columns(p.spec.head_dim, p.spec.value_dim)
    seconds = tile.block_seconds + CLUSTER_SECONDS * tile.in_cluster
    if p.spec.kv_view == "paged":
        seconds += PAGES_SECONDS
    elif tile.group_heads > 1 and not tile.in_cluster:
        seconds += GROUPED_SECONDS
    if p.spec.q_view == "packed":
        seconds += PACKED_BESIDE_PAGES if p.spec.kv_view == "paged" else PACKED_SECONDS
    alone = keys / tile.bn * tile.step_seconds
    blocks = expected_tiles(p, tile.rows, tile.group_heads) * tile.parts
    if tile.parts > 1 and blocks > device.limits.compute_units * tile.blocks:
        seconds += PARTS_SECONDS
    return Work(
        p.bytes_moved + again_bytes(p, keys * blocks),
        _waves(blocks, tile, device.limits.compute_units),
        step * keys,
        step * longest,
        p.spec.dtype,
        tile.rate * element_rate(p) * (COPIED_RATE if tile.page_rows == 1 else 1.0),
        seconds,
        alone + seconds if alone else 0.0,
    )


def _waves(blocks: int, tile: HopperAttentionTile, units: int) -> int:
    """Blocks, or of those that share multiprocessors and do not fit at once, those of whole
    waves."""
    if tile.blocks == 1 or blocks <= units:
        return blocks
    wave = units * tile.blocks
    return -(-blocks // wave) * wave
