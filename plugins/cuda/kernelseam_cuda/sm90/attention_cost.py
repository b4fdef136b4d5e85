"""What cuda_kernels/sm90/attention/forward.h asks of a device, by which tiles are chosen."""

from __future__ import annotations

from math import ceil

from kernelseam.contract import Device
from kernelseam.costs import Work
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.cost import STARTING, again_bytes, starting, tile_keys
from kernelseam.kernels.attention.ragged import expected_tiles, mean_queries, typical

from kernelseam_cuda.sm90.attention_blocks import element_rate
from kernelseam_cuda.sm90.attention_pages import COPIED_RATE
from kernelseam_cuda.sm90.attention_tiles import CONSUMER_ROWS, HopperAttentionTile

# Seconds are fitted to 500 random problems of H200s (benchmarks/notes/choices.md).
GROUPED_SECONDS = 1.2e-6
"""Added to a tile whose rows are the heads of a group: its result leaves from registers. A
cluster's does so anyway."""
PAGES_SECONDS = 1.9e-6
"""Added, in place of that, where the producer first reads where pages are."""
PAGES_AGAIN = 1.1
"""As ``STARTING``: a block asks for its next tile's pages when it begins with it (22 × 2 queries of
64 keys, 176 tiles of 32/8 heads of 128: 9.9 µs, where 12 × 1 of 18, 96 tiles, take 6.6)."""
PACKED_SECONDS, PACKED_BESIDE_PAGES = 3e-6, 2.7e-7
"""Added where it first reads where its sequence begins and ends, which pages hide in part; later
tiles' are found before their turn (291 sequences of up to 70 rows, 32/8 heads of 128: 98.7 µs)."""
PARTS_SECONDS = 1.6e-6
"""Added to a part of a tile's keys, whose result is float32, where more parts than run at once hide
none of it (6 × 192 queries of 16 heads of 64 on 3,712 keys: 54.6 µs whole, 61.9 in four parts)."""
CLUSTER_SECONDS = 3.6e-6
"""Added where the parts of keys are a cluster's blocks: its start, and the merge."""
LONE_CONSUMER = 0.84
"""Of a full tile's step, what one takes of whose consumers a single one has rows: the others pass
it by (128 rows, of which one query of four heads of 128 has four: 0.92 µs a step)."""


def forward_work(p: AttentionProblem, tile: HopperAttentionTile, device: Device) -> Work:
    """A tile's queries meet the keys visible to its middle one, and half a block and half a tile
    more; a part of the keys, its share in whole blocks."""
    keys, longest = tile_keys(p, tile.rows // tile.group_heads, tile.bn)
    if tile.parts > 1:
        keys, longest = (ceil(x / (tile.bn * tile.parts)) * tile.bn for x in (keys, longest))
    step = 2.0 * tile.bm * tile.columns(p.spec.head_dim, p.spec.value_dim) * _busy(p, tile)
    seconds = tile.block_seconds + CLUSTER_SECONDS * tile.in_cluster
    if p.spec.kv_view == "paged":
        seconds += PAGES_SECONDS
    elif tile.group_heads > 1 and not tile.in_cluster:
        seconds += GROUPED_SECONDS
    packed = 0.0
    if p.spec.q_view == "packed":
        packed = PACKED_BESIDE_PAGES if p.spec.kv_view == "paged" else PACKED_SECONDS
    tiles = expected_tiles(p, tile.rows, tile.group_heads) * tile.parts
    if tile.parts > 1 and tiles > device.limits.compute_units * tile.blocks:
        seconds += PARTS_SECONDS
    again = (PAGES_AGAIN, tile.blocks) if p.spec.kv_view == "paged" else (STARTING, 1)
    blocks, usual = _waves(tiles, tile, device.limits.compute_units), typical(p)
    started = starting(seconds, blocks, device, *again)
    started["start"] += packed
    return Work(
        usual.bytes_moved + again_bytes(usual, keys * tiles),
        blocks,
        step * keys,
        step * longest,
        p.spec.dtype,
        tile.rate * element_rate(p) * (COPIED_RATE if tile.page_rows == 1 else 1.0),
        alone=keys / tile.bn * tile.step_seconds,
        **started,
    )


def _busy(p: AttentionProblem, tile: HopperAttentionTile) -> float:
    """The part of a full tile's step that one takes whose last consumers have no rows."""
    rows, consumers = ceil(mean_queries(p)) * tile.group_heads, tile.bm // CONSUMER_ROWS
    idle = consumers - max(ceil(rows / CONSUMER_ROWS), 1)
    return 1.0 - (1.0 - LONE_CONSUMER) * idle / (consumers - 1) if idle > 0 else 1.0


def _waves(blocks: int, tile: HopperAttentionTile, units: int) -> int:
    """Blocks, or of those that share multiprocessors and do not fit at once, those of whole
    waves."""
    if tile.blocks == 1 or blocks <= units:
        return blocks
    wave = units * tile.blocks
    return -(-blocks // wave) * wave
