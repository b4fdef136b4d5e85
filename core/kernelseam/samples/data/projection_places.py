"""Where the tokens of a projection's case lie in pages, and what the append of its k and v makes of
the product."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.oracle import appended
from kernelseam.oracle import cache as oracle
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.projections import qkv_projection
from kernelseam.samples.data.attention import INVALID_PAGES, UNUSED_PAGES
from kernelseam.samples.data.memory import Placement, RowSpan
from kernelseam.samples.projection_case import ProjectionCase

Ints = npt.NDArray[np.int64]
Expected = tuple[dict[str, CacheRows], dict[str, Array]]
"""Rows by result, and what those of 8 bits are multiplied by."""
SPREAD = 3
"""The average distance between positions that are read from memory."""
BEFORE = 20
"""The most keys that an entry has before its tokens."""
_SCALES = ("k_scales", "v_scales")


def _rng(case: ProjectionCase, n: int) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(case.name.encode()) + n)


def entries(case: ProjectionCase) -> int:
    """Rows of the block table: sequences, or the batch."""
    return len(case.sequences) or case.batch


def ends(case: ProjectionCase) -> int:
    """One beyond the largest possible position."""
    if case.positions:
        return SPREAD * case.S + 5
    return case.first_position + case.S + (BEFORE if case.cached else 0)


@lru_cache(maxsize=8)
def tokens_of(case: ProjectionCase) -> tuple[Ints, Ints]:
    """(entry, place within it), [batch, S] each; entry −1 of rows that belong to no sequence."""
    shape = (case.batch, case.S)
    if not case.sequences:
        of_entry = np.broadcast_to(np.arange(case.batch)[:, None], shape)
        return of_entry, np.broadcast_to(np.arange(case.S), shape)
    padding = np.zeros(case.S - sum(case.sequences), np.int64)
    entry = np.concatenate([np.repeat(np.arange(entries(case)), case.sequences), padding - 1])
    within = np.concatenate([*[np.arange(n) for n in case.sequences], padding])
    return entry[None], within[None]


@lru_cache(maxsize=8)
def lengths(case: ProjectionCase) -> Ints:
    """The keys of each entry after the call; the first has fewer than it has tokens."""
    of = np.array(case.sequences or (case.S,) * case.batch, np.int64)
    result: Ints = of + _rng(case, 5).integers(0, BEFORE + 1, len(of))
    result[:1] = np.maximum(of[:1] - 1, 0)
    return result


@lru_cache(maxsize=8)
def positions(case: ProjectionCase) -> Ints:
    """The position of every token, [batch, S]; −1 of one before an entry's keys."""
    if case.positions:
        rng = _rng(case, 2)
        drawn = [rng.permutation(ends(case))[: case.S] for _ in range(case.batch)]
        return np.array(drawn, np.int64).reshape(case.batch, case.S)
    entry, within = tokens_of(case)
    if not case.cached:
        return case.first_position + within
    before = lengths(case) - np.array(case.sequences or (case.S,) * case.batch, np.int64)
    return within + np.where(entry < 0, 0, before[entry] if len(before) else 0)


@lru_cache(maxsize=8)
def slots(case: ProjectionCase) -> Ints:
    """[batch, S]: page · page_size + row of each token in pages; −1 where it has none."""
    entry, _ = tokens_of(case)
    if case.slots:
        result = _rng(case, 3).permutation(pages(case) * case.page_size)[: entry.size]
        result = result.reshape(entry.shape).astype(np.int64)
        result.reshape(-1)[1::4] = -1
        return result
    at = positions(case)
    stored = (entry >= 0) & (at >= 0)
    if not stored.any():
        return np.full(entry.shape, -1, np.int64)
    bounded = np.where(stored, at, 0)
    page = block_table(case)[np.maximum(entry, 0), bounded // case.page_size].astype(np.int64)
    return np.where(stored, page * case.page_size + bounded % case.page_size, -1)


@lru_cache(maxsize=8)
def block_table(case: ProjectionCase) -> npt.NDArray[np.int32]:
    """[entries, the pages of all positions and two more]: shuffled pages where a token is stored,
    else INVALID_PAGES."""
    needed = -(-ends(case) // case.page_size)
    table = np.resize(np.array(INVALID_PAGES, np.int32), (entries(case), needed + 2))
    order = list(_rng(case, 1).permutation(pages(case)))
    (entry, _), at = tokens_of(case), positions(case)
    for e, row in enumerate(table):
        for page in np.unique(at[(entry == e) & (at >= 0)] // case.page_size):
            row[page] = order.pop()
    return table


def pages(case: ProjectionCase) -> int:
    """The number of pages."""
    return entries(case) * -(-ends(case) // case.page_size) + UNUSED_PAGES


def integers(case: ProjectionCase) -> dict[str, Array]:
    """Operands that say where tokens lie."""
    found: dict[str, Array] = {}
    if case.positions:
        found["positions"] = positions(case).astype(np.int32)
    if not case.page_size:
        return found
    if case.slots:
        return {**found, "slot_mapping": slots(case).astype(np.int32)}
    found["block_table"] = block_table(case).copy()
    if case.cached:
        found["kv_lengths"] = lengths(case).astype(np.int32)
    if case.sequences:
        found["cu_seqlens"] = np.cumsum((0, *case.sequences)).astype(np.int32)
    return found


def given_scales(case: ProjectionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Scales of heads, by which nothing saturates."""
    if case.scaled != "heads":
        return {}
    shape = (1, case.kv_heads, 1)
    return {n: (0.4 + 0.1 * rng.random(shape)).astype(np.float32) for n in _SCALES}


def placements(case: ProjectionCase) -> dict[str, Placement]:
    """Those of integers and scales."""
    found = dict[str, Placement]()
    for name, x in integers(case).items():
        gap = 3 if name == "block_table" else 2
        row = x.shape[-1] + gap
        found[name] = Placement(name, DType.int32, x.shape, (row, 1)[2 - x.ndim :])
    for name in _SCALES if case.scaled else ():
        found[name] = Placement(name, DType.float32, (1, case.kv_heads, 1), (0, 1, 0))
        if case.scaled == "tokens":
            steps = (case.page_size * case.kv_heads, 1, case.kv_heads)
            shape = (case.batch, case.kv_heads, case.S)
            found[name] = in_pages(case, name, DType.float32, shape, steps)
    return found


def in_pages(
    case: ProjectionCase,
    name: str,
    dtype: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
) -> Placement:
    """Rows [batch, head, token, …] of tokens, scattered over pages with these strides (page, head,
    row, …)."""
    spans = tuple(
        RowSpan(
            b, s, 1, int(slot // case.page_size * strides[0] + slot % case.page_size * strides[2])
        )
        for (b, s), slot in np.ndenumerate(slots(case))
        if slot >= 0
    )
    whole = (pages(case), case.kv_heads, case.page_size, *shape[3:])
    least = 1 + sum((n - 1) * step for n, step in zip(whole, strides, strict=True))
    return Placement(name, dtype, shape, strides, offset, None, spans, least)


def expected(case: ProjectionCase, x: Mapping[str, Array]) -> Expected:
    """The oracle's rows for the case's values."""
    tables = (x["cos"], x["sin"]) if case.rotary else None
    at, stored = np.clip(positions(case), 0, ends(case) - 1), (slots(case) >= 0)[:, None, :, None]
    cos, sin = (None, None) if tables is None or case.appends_rotate else tables
    products = qkv_projection(
        x["input"][:, 0],
        x["weight"][0, 0],
        x.get("bias"),
        case.num_heads,
        case.kv_heads,
        case.head_dim,
        cos,
        sin,
        case.rotary,
        at,
    )
    rows = dict[str, CacheRows]()
    for name, (result, K) in products.items():
        late = tables if case.appends_rotate and name != "v" else None
        between = case.out_dtype if name != "q" or late else case.dtype.accumulator
        of = appended.rows(result, K, case.dtype, between, late, case.rotary, at)
        other = appended.rows(result, K, case.dtype, between)  # where nothing is rotated
        rows[name] = replace(
            of,
            value=np.where(stored, of.value, other.value if name == "q" else 0.0),
            magnitude=np.where(stored, of.magnitude, other.magnitude),
            error=np.where(stored, of.error, other.error if name == "q" else 0.0),
        )
    return rows, {n[0]: x[n] for n in _SCALES if n in x}


def verdict(
    case: ProjectionCase, expected: Expected, results: Mapping[str, Array], flushed: bool
) -> Verdict:
    """Rows, and scales where they are written, beside the oracle's."""
    rows, scales = expected
    written = dict[str, Array]()
    if case.scaled == "tokens":
        stored = (slots(case) >= 0)[:, None]
        written = {n[0]: np.where(stored, results[n], 2.0**-120) for n in _SCALES}
    found = {n: results[n] for n in rows}
    accumulator = case.dtype.accumulator
    return oracle.verdict(rows, found, {**scales, **written}, accumulator, written, flushed)
