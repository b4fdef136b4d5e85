"""Checks of what a paged cache's operands hold: places and positions must stay within memory, and
rows are divided by scales."""

from __future__ import annotations

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors.cache.places import Places, places_of
from kernelseam.descriptors.cache.problem import PagedCacheProblem
from kernelseam.descriptors.common.contents import (
    Ints,
    check_rising,
    first_of,
    read_integers,
    read_numbers,
    refuse,
    refuse_any,
)
from kernelseam.descriptors.common.protocol import Resolved

LEAST_SCALE = 2.0**-120
"""Of what rows are divided by: what is less counts as it."""
_SCALES = ("k_scales", "v_scales")
_READ = (
    "slot_mapping",
    "block_table",
    "kv_lengths",
    "positions",
    "cu_seqlens",
    "sources",
)


def check(problem: PagedCacheProblem, resolved: Resolved, runtime: Runtime, device: Device) -> None:
    """Raise InvalidValue, naming the entry, where one points beyond its operand. Copies them to the
    host; operands that are not bound are refused elsewhere."""
    p = problem
    read = read_integers(p.operands, _READ, resolved, runtime, device)
    if any(r.name in _READ and r.span and r.name not in read for r in p.operands):
        return
    if "cu_seqlens" in read:
        _offsets(read["cu_seqlens"], p.S)
    if "kv_lengths" in read:
        _lengths(p, read)
    if not p.tokens:
        return
    if p.spec.scaled == "heads" and p.spec.direction == "append":
        for name, scales in read_numbers(p.operands, _SCALES, resolved, runtime, device).items():
            x = scales.reshape(-1)
            rule = "must be finite and at least 2⁻¹²⁰: rows are divided by it"
            bad = ~((x >= LEAST_SCALE) & (x < np.inf))
            refuse_any(name, x, bad, rule, "Give 1 where a head's rows are 0, or correct it")
    places = places_of(p, read)
    _named(p, read, places)
    if p.spec.rotary:
        bad = places.stored & ((places.position < 0) | (places.position >= p.max_position))
        if bad.any():
            index = first_of(bad)
            given = p.spec.position == "given"
            name = "positions" if given else "the position of token"
            refuse(
                name,
                index,
                int(places.position[index]),
                f"must be from 0 to {p.max_position - 1}, as cos has rows",
                "Correct it, or give longer tables",
            )


def _named(p: PagedCacheProblem, read: dict[str, Ints], places: Places) -> None:
    """The pages that are read or written."""
    if "slot_mapping" in read:
        x, room = read["slot_mapping"], p.pages * p.page_size
        refuse_any(
            "slot_mapping",
            x,
            x >= room,
            f"must be a slot, below pages·page_size = {room}, or negative",
            "Correct it",
        )
        return
    bad = places.named & ((places.page < 0) | (places.page >= p.pages))
    if bad.any():
        index, copied = first_of(bad), "sources" in read
        place = int(places.entry[index]), int(places.column[index])
        refuse(
            "block_table",
            place[:1] if copied else place,
            int(places.page[index]),
            f"must be a page, from 0 to {p.pages - 1}",
            "Correct it" if copied else f"Name a page for token {list(index)}",
        )
    if "sources" in read:
        x = read["sources"]
        refuse_any(
            "sources",
            x,
            (x < 0) | (x >= p.pages),
            f"must be a page, from 0 to {p.pages - 1}",
            "Correct it",
        )
        written = read["block_table"][:, 0]
        again = np.ones(written.size, bool)
        again[np.unique(written, return_index=True)[1]] = False
        refuse_any(
            "block_table",
            written,
            again | np.isin(written, x),
            "must differ from those before it, and be no source: pages are copied in any order",
            "Copy in two calls, one after the other",
        )


def _lengths(p: PagedCacheProblem, read: dict[str, Ints]) -> None:
    """Within the table's room; of a gather, within the entry's rows of the results."""
    x, room = read["kv_lengths"], p.table_width * p.page_size
    rule, remedy = f"must be from 0 to {room}, which the table has room for", "give a wider table"
    refuse_any("kv_lengths", x, (x < 0) | (x > room), rule, f"Correct it, or {remedy}")
    if p.spec.direction != "gather":
        return
    if p.spec.packed:
        rows = np.diff(read["cu_seqlens"])
        rule, remedy = "exceeds the rows that cu_seqlens gives the entry", "give it more"
    else:
        rows = np.asarray(p.S)
        rule, remedy = f"must be at most S = {p.S}, an entry's rows", "raise S (max_seqlen_k)"
    refuse_any("kv_lengths", x, x > rows, rule, f"Correct it, or {remedy}")


def _offsets(x: Ints, rows: int) -> None:
    check_rising("cu_seqlens", x)
    if x[-1] > rows:
        rule = f"must not exceed the {rows} rows"
        refuse("cu_seqlens", (len(x) - 1,), int(x[-1]), rule, "Correct the last offset")
