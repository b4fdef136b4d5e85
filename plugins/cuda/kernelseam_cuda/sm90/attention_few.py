"""Few queries in cuda_kernels/sm90/attention/forward.h: query heads that share keys share a tile's
rows, and keys are cut into parts, so that the device is full."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from kernelseam.contract import Device, TensorMap
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.frozen import changed
from kernelseam.kernels.attention.parts import FEWEST_KEYS, MOST_PARTS
from kernelseam.kernels.attention.ragged import expected_tiles, mean_queries

from kernelseam_cuda.sm90.attention_blocks import is_banded
from kernelseam_cuda.sm90.attention_tiles import HopperAttentionTile

MOST_QUERIES, WORTH_SHARING = 2, 0.8
"""Times as many queries of a sequence as rows of a tile, on average, up to which heads share them;
more where they then have no more than this part of the tiles (H200: 16 × 261 queries of 24/8 heads
of 128, 0.78 of the tiles, 259 → 234 µs)."""
SMALL_TILES = 264
"""Up to so many tiles, two a multiprocessor, a problem is small, and up to twice as many where two
run at once."""
SMALL_SECONDS = 1.7e-6
"""What such a tile takes beside its keys, as ``block_seconds``, where it does not share its
multiprocessor: one of few queries has that to itself (an H200, random problems)."""

FEWEST_QUERIES = 9
"""Of a sequence, for clusters and for blocks that share a multiprocessor. Fewer have a kernel of
their own (``decode``), beside which these were not measured."""
CLUSTER_PARTS = 2, 3, 4, 6, 8
"""Of a tile's keys, in a cluster of as many blocks."""
_PROCESSING_CLUSTERS = 8
"""GPCs of a device. A cluster's blocks are in one; which GPCs lack multiprocessors, in pairs,
differs from card to card."""
CLUSTER_CONSUMERS = 2
"""More of a block have no registers for it."""
CLUSTER_KEYS = 128
"""Keys below which a part is not worth a block of a cluster."""
MOST_EVENED = 16
"""Parts of tiles that more than half fill the device."""
WORTH_EVENING = 0.95
"""Of the waves that fewer parts take: what more of them must come to, as each part begins anew."""
ALIKE = 4
"""Times as many keys as queries, with which tiles take about as long as each other: where a causal
mask hides more of some, a persistent block takes a long tile and others two short ones."""


def shared_rows(p: AttentionProblem, tile: HopperAttentionTile) -> HopperAttentionTile:
    """The tile with rows of all heads of a group, or of an equal part of them, whichever makes the
    fewest tiles. Such rows are not stored by TMA, which costs more than the last tile's empty rows
    of many."""
    shared = tile.sharing(_sharing(p, tile.bm)) if p.head_group > 1 else tile
    if mean_queries(p) > MOST_QUERIES * tile.bm:
        tiles = expected_tiles(p, shared.rows, shared.group_heads)
        if tiles > WORTH_SHARING * expected_tiles(p, tile.bm, 1):
            return tile
    return shared


def _sharing(p: AttentionProblem, bm: int) -> int:
    """Heads that share ``bm`` rows, with which there are the fewest tiles."""
    return min(parts_of_group(p.head_group, bm), key=lambda n: expected_tiles(p, bm // n * n, n))


@cache
def parts_of_group(heads: int, rows: int) -> tuple[int, ...]:
    """Numbers of heads that a tile's rows may have, of so many that share keys: one, then all of
    them where there are as many rows, and equal parts, the fewest parts first."""
    parts = (n for n in range(min(heads, rows), 1, -1) if heads % n == 0)
    return (1, *parts)


def fits(p: AttentionProblem, tile: HopperAttentionTile) -> bool:
    """Whether a tile is for so few queries, or for a problem so small that wider ones would leave
    multiprocessors idle."""
    if tile.blocks > 1 and p.S_q < FEWEST_QUERIES:
        return False
    most = SMALL_TILES * tile.blocks
    if _few_enough(p, tile) or expected_tiles(p, tile.bm, 1) <= most:
        return True
    if p.head_group == 1 or mean_queries(p) * p.batch * p.num_heads > most * tile.bm:
        return False
    heads = _sharing(p, tile.bm)
    return expected_tiles(p, tile.bm // heads * heads, heads) <= most


def fitting(
    p: AttentionProblem, tiles: tuple[HopperAttentionTile, ...]
) -> tuple[HopperAttentionTile, ...]:
    """Those of the tiles for few queries that fit."""
    return tuple(
        t if t.blocks > 1 or _few_enough(p, t) else changed(t, block_seconds=SMALL_SECONDS)
        for t in tiles
        if fits(p, t)
    )


def _few_enough(p: AttentionProblem, tile: HopperAttentionTile) -> bool:
    return not tile.most_rows or mean_queries(p) * p.head_group <= tile.most_rows


def for_few(
    p: AttentionProblem, tiles: tuple[HopperAttentionTile, ...], device: Device
) -> tuple[HopperAttentionTile, ...]:
    """These tiles, those with rows of all heads of a group, and both with keys in parts."""
    shared = _first_of_each((*tiles, *[shared_rows(p, t) for t in tiles]))
    parts, clusters = list[HopperAttentionTile](), list[HopperAttentionTile]()
    units = device.limits.compute_units
    for tile in shared:
        count = expected_tiles(p, tile.rows, tile.group_heads)
        parts += parted(p, tile, count, units) + evened(p, tile, count, units)
        clusters += clustered(p, tile, count, units)
    return _first_of_each((*shared, *parts, *clusters))


def _first_of_each(tiles: tuple[HopperAttentionTile, ...]) -> tuple[HopperAttentionTile, ...]:
    """Without those that come again as they are, which is told without a hash of all that they
    have."""
    return tuple({id(t): t for t in tiles}.values())


def grouped_rows(map_of_queries: TensorMap, tile: HopperAttentionTile) -> TensorMap:
    """A map of queries by rows whose boxes have all heads of a group, for one query after the
    other: axes column, head of the group, row, group, batch."""
    group = tile.group_heads
    width, rows, heads, batch = map_of_queries.extents
    one, row, head, entry = map_of_queries.strides
    columns = map_of_queries.box[0]
    return replace(
        map_of_queries,
        extents=(width, group, rows, heads // group, batch),
        strides=(one, head, row, head * group, entry),
        box=(columns, group, tile.box_queries, 1, 1),
    )


def parted(
    p: AttentionProblem, tile: HopperAttentionTile, tiles: int, units: int
) -> tuple[HopperAttentionTile, ...]:
    """The tile with keys in so many parts that the device is full, where tiles fill less than half
    of it, and in half as many, which leave less to merge. There are ``tiles`` of it, and ``units``
    multiprocessors."""
    keys = p.S_k if p.left is None else min(p.S_k, p.left + p.S_q)
    room = units * tile.blocks
    parts = 1 if not tiles or 2 * tiles > room else room // tiles
    most = max(min(parts, keys // FEWEST_KEYS, MOST_PARTS), 1)
    counts = dict.fromkeys((most, max(most // 2, 1)))
    return tuple(tile if n == tile.parts else changed(tile, parts=n) for n in counts)


def evened(
    p: AttentionProblem, tile: HopperAttentionTile, tiles: int, units: int
) -> tuple[HopperAttentionTile, ...]:
    """The tile with keys in parts where its tiles fill more than half of the device, at most twice,
    and leave a good part of it idle at the end: each number of parts that all take less of waves of
    whole tiles than any before."""
    room = units * tile.blocks
    alike = ALIKE * p.S_q <= p.S_k and p.left is None and is_banded(p.spec)
    if not alike or not room < 2 * tiles <= 4 * room:
        return ()
    least, found = float(-(-tiles // room)), list[HopperAttentionTile]()
    for parts in range(2, min(p.S_k // FEWEST_KEYS, MOST_EVENED) + 1):
        waves = -(-tiles * parts // room) / parts
        if waves <= WORTH_EVENING * least:
            least = waves
            found.append(changed(tile, parts=parts))
    return tuple(found)


def clustered(
    p: AttentionProblem, tile: HopperAttentionTile, tiles: int, units: int
) -> tuple[HopperAttentionTile, ...]:
    """The tile with keys in the most parts, each a block of a cluster, with which all clusters run
    at once, and in the next fewer."""
    if p.S_q < FEWEST_QUERIES or not has_clusters(tile):
        return ()
    keys = p.S_k if p.left is None else min(p.S_k, p.left + p.S_q)
    fitting = [
        n
        for n in CLUSTER_PARTS
        if 0 < tiles <= clusters_at_once(n, units) and n * CLUSTER_KEYS <= keys
    ]
    return tuple(changed(tile, parts=n, in_cluster=True) for n in fitting[-2:])


def has_clusters(tile: HopperAttentionTile) -> bool:
    """Whether the parts of such a tile may be a cluster's blocks."""
    return tile.groups <= CLUSTER_CONSUMERS and tile.value_parts == tile.blocks == 1


def clusters_at_once(blocks: int, units: int) -> int:
    """Clusters of so many blocks, one a multiprocessor, that run at once whichever the device's
    multiprocessors are: in each GPC as many as no whole cluster may idle."""
    return (units - _PROCESSING_CLUSTERS * (blocks - 2 + blocks % 2)) // blocks
