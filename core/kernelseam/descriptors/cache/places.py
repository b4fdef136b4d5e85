"""Where each token's rows lie in a paged cache, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.frozen import dataclass

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """All [batch, S]."""

    entry: Ints
    position: Ints
    column: Ints
    """Of the table; 0 of slots."""
    page: Ints
    row: Ints
    named: Bools
    """Whether the table is asked for the token's page."""
    stored: Bools
    """Whether the token has a place."""


def places_of(p: PagedCacheProblem, x: Mapping[str, npt.NDArray[np.integer]]) -> Places:
    """``x``: the integer operands by name. Pages beyond the operand count as no place."""
    s, shape = p.spec, (p.batch, p.S)
    row = np.broadcast_to(np.arange(p.S), shape)
    entry = np.broadcast_to(np.arange(p.batch)[:, None], shape)
    begin, end = np.zeros(shape, np.int64), np.full(shape, p.S, np.int64)
    known = np.ones(shape, bool)
    if s.packed:
        offsets = np.asarray(x["cu_seqlens"], np.int64)
        found = np.searchsorted(offsets, row[0], side="right") - 1
        known = ((found >= 0) & (found < p.sequences))[None]
        entry = np.clip(found, 0, max(p.sequences - 1, 0))[None]
        if p.sequences:
            begin, end = offsets[entry], offsets[entry + 1]
    if s.position == "given":
        position = np.asarray(x["positions"], np.int64)
    elif s.position == "lengths" and s.direction == "append" and known.any():
        position = np.asarray(x["kv_lengths"], np.int64)[entry] - (end - row)
    else:
        position = row - begin
    if s.slots:
        slot = np.asarray(x["slot_mapping"], np.int64)
        stored = (slot >= 0) & (slot < p.pages * p.page_size)
        page, within = np.divmod(np.where(stored, slot, 0), p.page_size)
        zeros = np.zeros(shape, np.int64)
        return Places(entry, position, zeros, page, within, np.zeros(shape, bool), stored)
    named = known & (position >= 0) & (position < p.table_width * p.page_size)
    if s.position == "lengths" and s.direction == "gather" and known.any():
        named = named & (position < np.asarray(x["kv_lengths"], np.int64)[entry])
    column, within = np.divmod(np.where(named, position, 0), p.page_size)
    page = np.zeros(shape, np.int64)
    if named.any():
        page = np.where(named, np.asarray(x["block_table"], np.int64)[entry, column], 0)
    stored = named & (page >= 0) & (page < p.pages)
    return Places(entry, position, column, page, within, named, stored)
