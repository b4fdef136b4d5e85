"""A paged cache case's operands: seeded values, their memory, and the descriptor over them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.descriptors import PagedCache
from kernelseam.dtypes import LARGEST, DType
from kernelseam.oracle.formulas import Array
from kernelseam.samples.cache_case import CacheCase
from kernelseam.samples.data.memory import Layout, Placement, RowSpan

_TABLE, _SPARE, _ROW_GAP = 7, 3, 3
"""Columns of a table, pages that nobody uses, and unused elements after rows of integers."""
_NOWHERE = -7
"""In tables, where no token asks."""
Ints = npt.NDArray[np.int64]


def _rng(case: CacheCase, n: int) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(case.name.encode()) + n)


def entries(case: CacheCase) -> int:
    """Sequences."""
    return len(case.packed) if case.packed else case.batch


def ends(case: CacheCase) -> int:
    """One beyond the largest position."""
    return _TABLE * case.page_size


@lru_cache(maxsize=8)
def tokens_of(case: CacheCase) -> tuple[Ints, Ints]:
    """(entry, place within it), [batch, S] each; −1 of rows that belong to no sequence."""
    if not case.packed:
        shape = case.lead
        return np.broadcast_to(np.arange(shape[0])[:, None], shape), np.broadcast_to(
            np.arange(shape[1]), shape
        )
    entry, within = np.full(case.lead, -1), np.full(case.lead, -1)
    at = 2
    for e, n in enumerate(case.packed):
        entry[0, at : at + n], within[0, at : at + n] = e, np.arange(n)
        at += n
    return entry, within


@lru_cache(maxsize=8)
def lengths(case: CacheCase) -> Ints:
    """The keys of each entry after an append; the first has fewer than it has rows."""
    of = case.packed or (case.S,) * case.batch
    drawn = [int(_rng(case, 5 + i).integers(n, ends(case) + 1)) for i, n in enumerate(of)]
    if case.direction == "gather":
        drawn = [min(n, m) for n, m in zip(drawn, of, strict=True)]
    if drawn and of[0] > 1:
        drawn[0] = of[0] - 1
    return np.array(drawn, np.int64)


@lru_cache(maxsize=8)
def positions(case: CacheCase) -> Ints:
    """[batch, S]; of rows of no sequence −1."""
    entry, within = tokens_of(case)
    result: Ints = within.copy()
    if case.position == "lengths" and case.direction == "append":
        of = np.array(case.packed or (case.S,) * case.batch)
        if result.size:
            result += np.where(entry < 0, 0, (lengths(case) - of)[entry])
    elif case.position == "given":
        for e in range(entries(case)):
            rows = entry == e
            result[rows] = _rng(case, 40 + e).permutation(ends(case))[: int(rows.sum())]
    return result if case.places == "table" else np.maximum(result, 0)


@lru_cache(maxsize=8)
def slots(case: CacheCase) -> Ints:
    """[batch, S]: the slot of each token, −1 where it has none."""
    entry, _ = tokens_of(case)
    if case.places != "table":
        result = _rng(case, 3).permutation(pages(case) * case.page_size)[: entry.size]
        result = result.reshape(entry.shape).astype(np.int64)
        result.reshape(-1)[::4] = -1
        return result
    at = positions(case)
    stored = (entry >= 0) & (at >= 0) & (at < ends(case))
    if case.direction == "gather" and case.position == "lengths" and stored.any():
        stored &= at < lengths(case)[entry]
    table = whole_table(case)
    bounded = np.where(stored, at, 0)
    page = table[np.maximum(entry, 0), bounded // case.page_size] if stored.any() else bounded
    return np.where(stored, page * case.page_size + bounded % case.page_size, -1)


@lru_cache(maxsize=8)
def whole_table(case: CacheCase) -> Ints:
    """A page of its own for every column."""
    order = _rng(case, 1).permutation(pages(case))[: entries(case) * _TABLE]
    return order.reshape(entries(case), _TABLE).astype(np.int64)


def block_table(case: CacheCase) -> npt.NDArray[np.int32]:
    """The same where a token asks, else no page."""
    table = whole_table(case)
    used = np.isin(table, np.unique(slots(case)[slots(case) >= 0] // case.page_size))
    return np.where(used, table, _NOWHERE).astype(np.int32)


def pages(case: CacheCase) -> int:
    """The number of pages."""
    return max(entries(case), 1) * _TABLE + _SPARE


def shapes(case: CacheCase) -> dict[str, tuple[int, int, int, int]]:
    """[batch, head, row, column] of tokens' rows, and of pages as the tokens see them."""
    B, S = case.lead
    result = dict[str, tuple[int, int, int, int]]()
    if case.num_heads:
        result |= dict.fromkeys(("q", "q_out"), (B, case.num_heads, S, case.head_dim))
    for name, dim in (("k", case.head_dim), ("v", case.value_dim)):
        if dim:
            result |= dict.fromkeys((name, f"{name}_pages"), (B, case.kv_heads, S, dim))
            if case.direction == "copy":
                result[name] = (pages(case), case.kv_heads, case.page_size, dim)
    return result


def outputs(case: CacheCase) -> tuple[str, ...]:
    """Names of the outputs."""
    if case.direction == "gather":
        return ("k", "v")[: 1 + bool(case.value_dim)]
    written = [n for n in shapes(case) if n == "q_out" or n.endswith("_pages")]
    if case.scaled == "tokens":
        written += ["k_scales", "v_scales"][: 1 + bool(case.value_dim)]
    return tuple(written)


def values(case: CacheCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name."""
    inputs, written = dict[str, Array](), outputs(case)
    for name, shape in shapes(case).items():
        if name not in written:
            dtype = case.pages_dtype if name.endswith("_pages") else case.dtype
            x = rng.standard_normal(shape)
            if case.data == "wide":
                x *= 2.0 ** rng.integers(-20, 10, shape)
            elif case.data == "nan":
                x.reshape(-1)[::7] = np.nan
            if case.pages_dtype is DType.float8_e4m3fnuz:
                x = np.where(x < 0, x / 16, x)  # −240 has the bits of memory that nobody wrote
            bound = LARGEST.get(dtype, np.inf)
            inputs[name] = np.clip(x, -bound, bound).astype(dtype.numpy)
    if case.scaled and case.direction == "gather":
        of_tokens = (case.lead[0], case.kv_heads, case.lead[1])
        of_scales = of_tokens if case.scaled == "tokens" else (1, case.kv_heads, 1)
        inputs |= {n: rng.random(of_scales).astype(np.float32) + 0.1 for n in _scale_names(case)}
    elif case.scaled == "heads":
        inputs |= {
            n: (rng.random((1, case.kv_heads, 1)) * 0.01 + 0.002).astype(np.float32)
            for n in _scale_names(case)
        }
    if case.norm:
        for name in ("q_norm",) * bool(case.num_heads) + ("k_norm",):
            inputs[name] = (1 + rng.standard_normal(case.head_dim) / 4).astype(case.norm.numpy)
    if case.rotary:
        half = case.turned // 2
        angles = np.arange(ends(case))[:, None] / 50.0 ** (np.arange(half) / max(half, 1))
        inputs |= {
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }
    return {**inputs, **_integers(case)}


def _pages_names(case: CacheCase) -> tuple[str, ...]:
    return ("k_pages", "v_pages")[: 1 + bool(case.value_dim)]


def _scale_names(case: CacheCase) -> tuple[str, ...]:
    return ("k_scales", "v_scales")[: 1 + bool(case.value_dim)]


def _integers(case: CacheCase) -> dict[str, Array]:
    found: dict[str, Array] = {}
    if case.direction == "copy":
        table = whole_table(case)
        found["sources"] = table[:, 1].astype(np.int32)
        found["block_table"] = table[:, :1].astype(np.int32)
    elif case.places == "table":
        found["block_table"] = block_table(case)
        if case.position == "lengths":
            found["kv_lengths"] = lengths(case).astype(np.int32)
        if case.packed:
            found["cu_seqlens"] = np.cumsum((2, *case.packed)).astype(np.int32)
    else:
        wide = case.places == "slots64"
        found["slot_mapping"] = slots(case).astype(np.int64 if wide else np.int32)
    if case.position == "given" and (case.places == "table" or case.rotary):
        found["positions"] = positions(case).astype(np.int32)
    return found


def placements(case: CacheCase) -> dict[str, Placement]:
    """Every operand's placement."""
    placements = {}
    for name, shape in shapes(case).items():
        if name.endswith("_pages"):
            placements[name] = _paged(case, name, shape, case.pages_dtype)
            continue
        at = case.operand_layout(name)
        strides = (*at.strides(shape, case.dtype.itemsize), 1)
        spans = None
        if name in (*outputs(case), "q") and (name == "q_out" or case.direction == "gather"):
            spans = tuple(
                RowSpan(int(b), int(s), 1, int(b * strides[0] + s * strides[2]))
                for b, s in np.argwhere(slots(case) >= 0)
            )
        least = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        empty = 0 in shape
        placements[name] = Placement(
            name, case.dtype, shape, strides, at.offset, None, spans, 0 if empty else least
        )
    if case.direction == "copy":
        for name in _pages_names(case):
            whole = placements[name.removesuffix("_pages")]
            placements[name.removesuffix("_pages")] = replace(whole, block=name)
    if case.in_place:
        placements["q_out"] = Placement(
            "q", *(getattr(placements["q_out"], n) for n in ("dtype", "shape", "strides", "offset"))
        )
    f32, i32 = DType.float32, DType.int32
    if case.scaled == "heads":
        for name in _scale_names(case):
            placements[name] = Placement(name, f32, (1, case.kv_heads, 1), (0, 2, 0))
    elif case.scaled == "tokens":
        for name in _scale_names(case):
            placements[name] = _paged(case, name, (case.lead[0], case.kv_heads, case.lead[1]), f32)
    if case.norm:
        for name in ("q_norm",) * bool(case.num_heads) + ("k_norm",):
            placements[name] = Placement(name, case.norm, (case.head_dim,), (1,))
    if case.rotary:
        half = case.turned // 2
        for name in ("cos", "sin"):
            placements[name] = Placement(name, f32, (ends(case), half), (half + 4, 1))
    for name, x in _integers(case).items():
        kind = DType.int64 if x.dtype == np.int64 else i32
        row = x.shape[-1] + _ROW_GAP
        placements[name] = Placement(name, kind, x.shape, (row, 1)[2 - x.ndim :])
    return placements


def _paged(case: CacheCase, name: str, shape: tuple[int, ...], dtype: DType) -> Placement:
    """Rows of tokens, scattered over pages."""
    dim = shape[3] if len(shape) == 4 else 1
    whole = (pages(case), case.kv_heads, case.page_size, dim)
    strides = case.operand_layout(name).strides(whole, dtype.itemsize)
    if len(shape) == 3:
        strides = (case.kv_heads * case.page_size, 1, case.kv_heads)
    at = whole_table(case)[:, :1] * case.page_size + np.arange(case.page_size)
    at = at if case.direction == "copy" else slots(case)
    spans = tuple(
        RowSpan(int(b), int(s), 1, page * strides[0] + row * strides[2])
        for b, s in np.argwhere(at >= 0)
        for page, row in [divmod(int(at[b, s]), case.page_size)]
    )
    steps = (*strides, 1)[: len(shape)]
    least = 1 + sum((n - 1) * s for n, s in zip(whole[: len(shape)], steps, strict=True))
    offset = case.operand_layout(name).offset
    return Placement(name, dtype, shape, steps, offset, None, spans, least)


def describe(case: CacheCase, layout: Layout, addresses: Mapping[str, Any]) -> PagedCache:
    """The descriptor over addresses."""
    fields: dict[str, Any] = dict(addresses)
    for name, p in layout.placements.items():
        known = PagedCache.stride_fields(name)
        fields |= dict(zip(known, p.strides, strict=False))
    if case.places == "table":
        fields["table_width"] = 1 if case.direction == "copy" else _TABLE
    else:
        fields["dtype_slots"] = layout.placements["slot_mapping"].dtype
    if case.packed and case.places == "table":
        fields["sequences"] = len(case.packed)
    if case.num_heads:
        fields["num_heads"] = case.num_heads
    if case.rotary:
        fields |= {
            "rotary_style": case.rotary,
            "rotary_dim": case.turned,
            "max_position": ends(case),
        }
    if case.norm:
        fields |= {"dtype_norm": case.norm, "eps": 1e-5}
    B, S = case.lead
    return PagedCache(
        **fields,
        direction=case.direction,
        batch=B,
        S=S,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        pages=pages(case),
        page_size=case.page_size,
        scales=case.scaled or None,
        dtype=case.dtype,
        dtype_pages=case.pages_dtype,
    )
