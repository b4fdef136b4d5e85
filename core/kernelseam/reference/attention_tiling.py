"""How an attention on the host is cut: stacks of KV heads, and blocks of queries and keys.

A block of scores is [batch, KV heads, keys, columns]; the columns are queries of the query heads
that share a KV head, so that keys are read once for all of them. Reductions over keys are then
vectorized over columns. A row's blocks depend on its own sequence alone; how many heads are in a
stack changes nothing about their bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.frozen import dataclass

ELEMENTS = 1 << 18
"""Of a block of scores, and of its queries: 1 MiB in float32. A core's L2 has room for it, and
threads seldom wait for each other at the interpreter's lock."""
_COPIED = 1 << 18
"""Elements of the copies of k and of v that a stack of several heads may have."""


@dataclass(frozen=True)
class Block:
    """The extents of a block: columns and keys."""

    columns: int
    keys: int


@dataclass(frozen=True)
class Tiling:
    """Of one problem: the most of everything that a thread takes at once."""

    batch: int
    """Entries, whose lengths are alike."""
    kv_heads: int
    heads: int
    """Query heads of a KV head's group; ``queries`` of each are the columns of a block."""
    queries: int
    keys: int

    @property
    def stack(self) -> int:
        return self.batch * self.kv_heads

    @property
    def columns(self) -> int:
        return padded(self.heads * self.queries)

    def blocks(self, group: int, S_q: int) -> Iterator[tuple[slice, int, int]]:
        """(heads within the group, first query, queries)"""
        for h, i in itertools.product(range(0, group, self.heads), range(0, S_q, self.queries)):
            yield slice(h, min(h + self.heads, group)), i, min(self.queries, S_q - i)

    def stacks(self, batch: int, kv_heads: int) -> list[tuple[slice, slice]]:
        """(entries, KV heads) of all stacks."""
        return list(itertools.product(slices(batch, self.batch), slices(kv_heads, self.kv_heads)))


def padded(columns: int) -> int:
    """Columns computed for so many: BLAS has no fast path for one, nor for the rest of an odd
    number."""
    return max(columns, 2) if columns < 8 else -(-columns // 8) * 8


def tiling(p: AttentionProblem, block: Block, copied: int, threads: int) -> Tiling:
    """``copied``: elements of a KV head's longest copy or gradient in scratch; 0: none."""
    heads = max(min(p.head_group, block.columns), 1)
    queries = max(min(p.S_q, block.columns // heads), 1)
    keys = min(p.S_k, block.keys)
    columns = padded(heads * queries)
    room = ELEMENTS // max(columns * max(keys, p.spec.head_dim, p.spec.value_dim), 1)
    if copied:
        room = min(room, _COPIED // copied)
    views = {p.spec.q_view, p.spec.kv_view}
    # two stacks for a thread balance the load
    room = max(min(room, -(-p.batch * p.kv_heads // (2 * threads))), 1)
    if "pointers" in views:
        room = 1
    kv_heads = min(p.kv_heads, room)
    alike = views == {"strided"} and not p.spec.lengths and not p.spec.prefix
    batch = min(p.batch, room // max(kv_heads, 1)) if alike and kv_heads == p.kv_heads else 1
    return Tiling(max(batch, 1), max(kv_heads, 1), heads, queries, keys)


def slices(stop: int, step: int, start: int = 0) -> list[slice]:
    """The range from start to stop in runs of ``step``, the last of which may be shorter."""
    return [slice(i, min(i + step, stop)) for i in range(start, stop, step)]
