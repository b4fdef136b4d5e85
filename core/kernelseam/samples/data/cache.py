"""A paged cache case's operands: seeded values, their memory, and the descriptor over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from kernelseam.descriptors import PagedCache
from kernelseam.dtypes import LARGEST, DType
from kernelseam.oracle.formulas import Array
from kernelseam.samples.cache_case import CacheCase
from kernelseam.samples.data.memory import Layout, Placement, RowSpan
from kernelseam.samples.data.places import Places, of_integers

_TABLE = 7
"""Columns of a table."""


@lru_cache(maxsize=8)
def places(case: CacheCase) -> Places:
    """Where its tokens lie."""
    kinds = {"slots": DType.int32, "slots64": DType.int64}
    return Places(
        case.name,
        case.lead,
        case.page_size,
        _TABLE * case.page_size,
        case.position,
        case.packed,
        2,
        slot_dtype=kinds.get(case.places),
        gathers=case.direction == "gather",
    )


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
                result[name] = (places(case).pages, case.kv_heads, case.page_size, dim)
    return result


def outputs(case: CacheCase) -> tuple[str, ...]:
    if case.direction == "gather":
        return ("k", "v")[: 1 + bool(case.value_dim)]
    written = [n for n in shapes(case) if n == "q_out" or n.endswith("_pages")]
    if case.scaled == "tokens":
        written += ["k_scales", "v_scales"][: 1 + bool(case.value_dim)]
    return tuple(written)


def values(case: CacheCase, rng: np.random.Generator) -> dict[str, Array]:
    inputs, written = dict[str, Array](), outputs(case)
    for name, shape in shapes(case).items():
        if name not in written:
            dtype = case.pages_dtype if name.endswith("_pages") else case.dtype
            x = rng.standard_normal(shape)
            if case.data == "wide":
                x *= 2.0 ** rng.integers(-20, 10, shape)
            elif case.data == "nan":
                x.reshape(-1)[::7] = np.nan
            elif case.data == "zeros":
                x[..., ::2, :] = 0
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
        half = case.rotated // 2
        angles = np.arange(places(case).ends)[:, None] / 50.0 ** (np.arange(half) / max(half, 1))
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
    own = places(case)
    if case.direction == "copy":
        sources, destinations = own.whole_table[:, 1], own.whole_table[:, :1]
        return {
            "sources": sources.astype(np.int32),
            "block_table": destinations.astype(np.int32),
        }
    return own.integers(case.places == "table" or bool(case.rotary))


def placements(case: CacheCase) -> dict[str, Placement]:
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
                for b, s in np.argwhere(places(case).slots >= 0)
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
    f32 = DType.float32
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
        half = case.rotated // 2
        for name in ("cos", "sin"):
            placements[name] = Placement(name, f32, (places(case).ends, half), (half + 4, 1))
    return placements | of_integers(_integers(case))


def _paged(case: CacheCase, name: str, shape: tuple[int, ...], dtype: DType) -> Placement:
    """Rows of tokens, scattered over pages."""
    own, at, operand_layout = places(case), None, case.operand_layout(name)
    if case.direction == "copy":
        at = own.whole_table[:, :1] * case.page_size + np.arange(case.page_size)
    strides: tuple[int, ...] = (case.kv_heads * case.page_size, 1, case.kv_heads)
    if len(shape) == 4:
        whole = (own.pages, case.kv_heads, case.page_size, shape[3])
        strides = (*operand_layout.strides(whole, dtype.itemsize), 1)
    return own.in_pages(name, dtype, shape, strides, operand_layout.offset, at)


def describe(case: CacheCase, layout: Layout, addresses: Mapping[str, Any]) -> PagedCache:
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
            "rotary_dim": case.rotated,
            "max_position": places(case).ends,
        }
    if case.norm:
        fields |= {"dtype_norm": case.norm, "eps": 1e-5}
    B, S = case.lead
    return PagedCache(
        **fields,
        **case.fields("direction", "kv_heads", "head_dim", "value_dim", "page_size", "dtype"),
        batch=B,
        S=S,
        pages=places(case).pages,
        scales=case.scaled or None,
        dtype_pages=case.pages_dtype,
    )
