"""What the host knows of sequences that differ in length: the longest, and their total."""

from __future__ import annotations

import math

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.frozen import changed

UNKNOWN, EVEN_UNKNOWN = 0.9, 0.8
"""Of the longest, the keys of an average sequence of a batch that decodes, where their numbers are
in device memory: between batches that are equally long and those of any length up to it. Tiles of
one sequence each wait for the longest, blocks that share all keys evenly do not (40 × 1 to 9435
keys of 4/1 heads of 256: 42 and 21 µs; where all are equally long, the same within 10 %)."""
DECODES = 4
"""Queries of a sequence, on average, below which a batch decodes, or checks drafts."""


def mean_queries(p: AttentionProblem) -> float:
    """Of a sequence."""
    return p.total_q / p.batch if p.spec.q_view == "packed" and p.batch else p.S_q


def typical(p: AttentionProblem, unknown: float = UNKNOWN) -> AttentionProblem:
    """The problem with sequences that are all as long as that of an average tile. Long ones have
    more tiles: between the mean and the longest, their geometric mean. What decodes has one tile
    of each, and where the host does not know how long they are, ``unknown`` of the longest."""
    if p.spec.lengths and p.batch > 1 and mean_queries(p) < DECODES:
        return changed(p, S_k=max(math.ceil(unknown * p.S_k), p.S_q))
    if p.spec.q_view != "packed" or not p.batch:
        return p
    queries, keys = _between(p.total_q, p.batch, p.S_q), p.S_k
    if p.spec.kv_view == "packed":
        keys = _between(p.total_k, p.batch, p.S_k)
    return p if (queries, keys) == (p.S_q, p.S_k) else changed(p, S_q=queries, S_k=keys)


def _between(total: int, batch: int, longest: int) -> int:
    return min(math.ceil(math.sqrt(total / batch * longest)), longest)


def expected_tiles(p: AttentionProblem, rows: int, shared: int) -> int:
    """Tiles of ``rows`` rows, each query one of ``shared`` heads: those of all heads of the batch.
    Of packed sequences half a tile each beside their queries, but no more than if each were as long
    as the longest, and one at least."""
    heads = p.num_heads // shared
    most = -(-p.S_q * shared // rows) * p.batch * heads
    if p.spec.q_view != "packed" or p.total_q >= p.batch * p.S_q:
        return most
    tiles = min(round((p.total_q * shared / rows + p.batch / 2) * heads), most)
    return max(tiles, min(p.batch, p.total_q) * heads, 1)
