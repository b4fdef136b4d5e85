"""Where tokens lie in the pages of a cache: positions, lengths, tables and slots, seeded by a
case's name. Arrays are [batch, S] where nothing else is said."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.oracle.formulas import Array
from kernelseam.samples.data.attention import INVALID_PAGES, UNUSED_PAGES
from kernelseam.samples.data.memory import Placement, RowSpan

Ints = npt.NDArray[np.int64]
_ROW_GAP = 3
"""Unused elements after rows of integers."""


@dataclass(frozen=True)
class Places:
    """The tokens of a case."""

    name: str
    lead: tuple[int, int]
    """(batch, S)."""
    page_size: int
    """0: there are no pages."""
    ends: int
    """One beyond the largest position."""
    counted: str
    """How positions are: "lengths", the last of so many keys of their entry, of which the first has
    fewer than it has tokens; "given", in memory, shuffled with gaps; or "", from ``origin`` on."""
    sequences: tuple[int, ...] = ()
    """Lengths of packed ones; rows before and after them belong to none."""
    before: int = 0
    """Rows before the first of them."""
    origin: int = 0
    slot_dtype: DType | None = None
    """Of slots in place of a block table, some of them negative."""
    gathers: bool = False
    spare: int = 0
    """Columns of the block table behind those of all positions."""

    @property
    def entries(self) -> int:
        """Rows of the block table: sequences, or the batch."""
        return len(self.sequences) or self.lead[0]

    @property
    def columns(self) -> int:
        """Of the block table, for all positions."""
        return -(-self.ends // self.page_size)

    @property
    def pages(self) -> int:
        return max(self.entries, 1) * self.columns + UNUSED_PAGES

    def _rng(self, n: int) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(self.name.encode()) + n)

    @cached_property
    def counts(self) -> Ints:
        """The tokens of each entry."""
        return np.array(self.sequences or (self.lead[1],) * self.lead[0], np.int64)

    @cached_property
    def tokens(self) -> tuple[Ints, Ints]:
        """(entry, place within it); −1 of rows that belong to no sequence."""
        if not self.sequences:
            entry, within = np.indices(self.lead)
            return entry, within
        entry, within = np.full(self.lead, -1), np.full(self.lead, -1)
        ends = self.before + np.cumsum(self.counts)
        for e, (n, end) in enumerate(zip(self.sequences, ends, strict=True)):
            entry[0, end - n : end], within[0, end - n : end] = e, np.arange(n)
        return entry, within

    @cached_property
    def lengths(self) -> Ints:
        """The keys of each entry, an append's included."""
        drawn = [
            int(self._rng(5 + i).integers(n, self.ends + 1)) for i, n in enumerate(self.counts)
        ]
        result = np.minimum(drawn, self.counts) if self.gathers else np.array(drawn, np.int64)
        result[:1] = np.maximum(self.counts[:1] - 1, 0)
        return result

    @cached_property
    def positions(self) -> Ints:
        """−1 of a token before its entry's keys."""
        (entry, within), result = self.tokens, self.tokens[1] + self.origin
        if self.counted == "lengths" and not self.gathers and result.size:
            result = within + np.where(entry < 0, 0, (self.lengths - self.counts)[entry])
        elif self.counted == "given":
            result = np.maximum(within, 0)
            for e in range(self.entries):
                rows = entry == e
                result[rows] = self._rng(40 + e).permutation(self.ends)[: int(rows.sum())]
        return result if self.slot_dtype is None else np.maximum(result, 0)

    @cached_property
    def slots(self) -> Ints:
        """page · page_size + row of each token in pages; −1 where it has none."""
        (entry, _), at, size = self.tokens, self.positions, self.page_size
        if self.slot_dtype is not None:
            result = self._rng(3).permutation(self.pages * size)[: entry.size].astype(np.int64)
            result[1::4] = -1
            return result.reshape(entry.shape)
        stored = (entry >= 0) & (at >= 0) & (at < self.ends)
        if self.gathers and self.counted == "lengths" and stored.any():
            stored &= at < self.lengths[entry]
        if not stored.any():
            return np.full(entry.shape, -1, np.int64)
        at = np.where(stored, at, 0)
        page = self.whole_table[np.maximum(entry, 0), at // size]
        return np.where(stored, page * size + at % size, -1)

    @cached_property
    def whole_table(self) -> Ints:
        """[entries, columns]: a page of its own for each."""
        order = self._rng(1).permutation(self.pages)[: self.entries * self.columns]
        return order.reshape(self.entries, self.columns).astype(np.int64)

    @cached_property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The same where a token is stored, else ``INVALID_PAGES``, and the spare columns."""
        width = self.columns + self.spare
        table = np.resize(np.array(INVALID_PAGES, np.int32), (self.entries, width))
        used = np.isin(self.whole_table, np.unique(self.slots[self.slots >= 0] // self.page_size))
        table[:, : self.columns][used] = self.whole_table[used]
        return table

    def integers(self, positioned: bool = True) -> dict[str, Array]:
        """Operands that say where tokens lie; ``positioned``: positions that are given, too."""
        found: dict[str, Array] = {}
        if positioned and self.counted == "given":
            found["positions"] = self.positions.astype(np.int32)
        if self.slot_dtype is not None:
            found["slot_mapping"] = self.slots.astype(self.slot_dtype.numpy)
        elif self.page_size:
            found["block_table"] = self.block_table.copy()
            if self.counted == "lengths":
                found["kv_lengths"] = self.lengths.astype(np.int32)
            if self.sequences:
                ends = np.cumsum((self.before, *self.sequences))
                found["cu_seqlens"] = ends.astype(np.int32)
        return found

    def in_pages(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        at: Ints | None = None,
    ) -> Placement:
        """Rows [batch, head, token, …], scattered over pages with these strides (page, head, row,
        …). ``at``: their slots, where they are not the tokens'."""
        at, size = self.slots if at is None else at, self.page_size
        spans = tuple(
            RowSpan(b, s, 1, int(slot // size * strides[0] + slot % size * strides[2]))
            for (b, s), slot in np.ndenumerate(at)
            if slot >= 0
        )
        whole = (self.pages, shape[1], size, *shape[3:])
        least = 1 + sum((n - 1) * step for n, step in zip(whole, strides, strict=True))
        return Placement(name, dtype, shape, strides, offset, None, spans, least)


def of_integers(found: dict[str, Array]) -> dict[str, Placement]:
    """The placements of operands of integers, with gaps behind their rows."""
    return {
        name: Placement(
            name, DType(str(x.dtype)), x.shape, (x.shape[-1] + _ROW_GAP, 1)[2 - x.ndim :]
        )
        for name, x in found.items()
    }
