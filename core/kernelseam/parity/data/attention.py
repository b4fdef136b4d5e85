"""An attention case's operands: seeded values, where they lie, and what the oracle is told of
them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.oracle.formulas import Array, Variant
from kernelseam.parity.cases.attention_case import AttentionCase
from kernelseam.parity.cases.walk import Walk
from kernelseam.parity.data.memory import Piece, Place, once, repeated, scattered

NOWHERE = (-1, 2**31 - 1)
"""What stands in a block table behind the pages of an entry."""
SPARE_PAGES = 3
"""Pages that no table names."""


def shapes(case: AttentionCase) -> dict[str, tuple[int, int, int, int]]:
    """Of the operands with rows, entry by entry: S_q and S_k are the most that one has."""
    B, H, G = case.batch, case.num_heads, case.kv_heads
    return {
        "q": (B, H, case.S_q, case.head_dim),
        "k": (B, G, case.S_k, case.head_dim),
        "v": (B, G, case.S_k, case.value_dim),
        "out": (B, H, case.S_q, case.value_dim),
    }


def values(case: AttentionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name; of q, k, v, bias and mask [batch, head, row, column], whatever their view."""
    lie, walks = shapes(case), {"q": case.q, "k": case.k, "v": case.v}
    q, k, v = (rng.standard_normal(once(lie[name], walk)) for name, walk in walks.items())
    shape_scores(q, k, case.data)
    if case.steps:
        step(q, k, case.steps, case.steps_every)
    if case.data == "faint":
        v[...] = np.where(k[..., 1:2] == k[..., 1].max(), 0, np.abs(v))
    if case.ramp:
        ramp(q, k)
    found: dict[str, Array] = {
        name: repeated(x.astype(case.dtype.numpy), lie[name])
        for name, x in zip(walks, (q, k, v), strict=True)
    }
    plane = (case.batch, case.num_heads, case.S_q, case.S_k)
    if case.bias:
        found["bias"] = repeated(_bias(case, once(plane, case.bias_walk), rng), plane)
    if case.mask:
        found["mask"] = repeated(_mask(case.mask, once(plane, case.mask_walk), rng), plane)
    if case.alibi:
        steeper = (
            np.arange(1, case.batch + 1)[:, None] if case.alibi_batch else np.ones((case.batch, 1))
        )
        found["alibi_slopes"] = (steeper * case.alibi).astype(np.float32)
    if case.sinks:
        found["sinks"] = np.array(case.sinks, np.float32)
    for name, given in (("prefix_lengths", case.prefix), ("kv_lengths", case.kv_lengths)):
        if given is not None:
            found[name] = np.array(given, np.int32)
    for letter, lengths in (("q", case.q_sequences), ("k", case.k_sequences)):
        if lengths is not None:
            found[f"cu_seqlens_{letter}"] = np.array(offsets(lengths, case.margin), np.int32)
    if case.page_size:
        found["block_table"] = block_table(case).copy()
    return found


def shape_scores(q: Array, k: Array, kind: str) -> None:
    """Make the scores what AttentionCase.data says, in place, through column 1 of q and k."""
    if kind == "extreme":
        q *= 16
        k *= 16
    elif kind == "falling":
        q[..., 1], k[..., 1] = 8, -64
    elif kind == "climbing":
        q[..., 1], k[..., 1] = math.sqrt(q.shape[-1]), 4 * np.arange(k.shape[-2])
    elif kind in ("holes", "voids"):
        q[..., 1] = 1 + np.abs(q[..., 1])
        k[..., :: 3 if kind == "holes" else 1, 1] = -np.inf
    elif kind == "faint":
        q[...], k[...] = 0, 0
    elif kind != "normal":
        raise ValueError(kind)


def step(q: Array, k: Array, steps: tuple[tuple[int, float], ...], every: int = 1) -> None:
    """q[…,1] = √D for every so many-th query, else 0, and k[j,1] = the score of the last step at or
    before j."""
    q[..., 1] = 0
    q[..., ::every, 1] = math.sqrt(q.shape[-1])
    for first, score in steps:
        k[..., first:, 1] = score


def ramp(q: Array, k: Array) -> None:
    """q[…,0] = √D and k[j,0] = j/16, in place: with the default scale key j's score gains j/16."""
    q[..., 0] = math.sqrt(q.shape[-1])
    k[..., 0] = np.arange(k.shape[-2]) / 16


def _bias(case: AttentionCase, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    assert case.bias is not None
    x = rng.standard_normal(shape)
    if case.bias_data == "holes":
        x[rng.random(shape) < 1 / 3] = -np.inf
    elif case.bias_data == "voids":
        x[:, :, ::3] = -np.inf
    elif case.bias_data == "low":
        x[rng.random(shape) < 1 / 2] = -60000
    elif case.bias_data == "lowest":
        x[rng.random(shape) < 1 / 3] = x[:, :, ::3] = float(ml_dtypes.finfo(case.bias.numpy).min)
    elif case.bias_data != "normal":
        raise ValueError(case.bias_data)
    # What lies beyond an entry's lengths belongs to nobody.
    for lengths, axis in ((case.q_sequences, 2), (case.keys, 3)):
        for b, n in enumerate(lengths or ()):
            if shape[0] == case.batch and shape[axis] > 1:
                np.moveaxis(x[b], axis - 1, 0)[n:] = np.nan
    return x.astype(case.bias.numpy)


def _mask(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    hidden = np.zeros(shape, bool)
    if kind == "random":
        hidden = rng.random(shape) < 1 / 3
    elif kind == "keys":
        hidden |= rng.random(shape[-1]) < 1 / 3
    elif kind == "rows":
        hidden[:, :, ::3] = True
    elif kind == "all":
        hidden[...] = True
    else:
        raise ValueError(kind)
    return ~hidden


def offsets(lengths: tuple[int, ...], margin: int) -> list[int]:
    """Where each packed sequence begins, and where the last one ends."""
    return [*accumulate(lengths, initial=margin)]


@lru_cache(maxsize=8)
def block_table(case: AttentionCase) -> npt.NDArray[np.int32]:
    """[batch, pages that S_k needs and two more]: shuffled pages, then NOWHERE."""
    size, lengths = case.page_size, case.keys or ()
    used = [-(-n // size) for n in lengths]
    width = -(-case.S_k // size) + 2
    table = np.resize(np.array(NOWHERE, np.int32), (case.batch, width))
    order = np.random.default_rng(zlib.crc32(case.name.encode()) + 1).permutation(
        sum(used) + SPARE_PAGES
    )
    for b, n in enumerate(used):
        table[b, :n], order = order[:n], order[n:]
    return table


def pages(case: AttentionCase) -> int:
    """How many there are."""
    return sum(-(-n // case.page_size) for n in case.keys or ()) + SPARE_PAGES


def places(case: AttentionCase) -> dict[str, Place]:
    """Where every operand lies."""
    lie, found, plane = shapes(case), {}, (case.batch, case.num_heads, case.S_q, case.S_k)
    for name, walk in (("q", case.q), ("k", case.k), ("v", case.v), ("out", case.out)):
        found[name] = rows(
            case, name, walk, lie[name], case.out_dtype if name == "out" else case.dtype
        )
    if case.packed:
        H, G, D = case.num_heads, case.kv_heads, case.head_dim
        row = (H + 2 * G) * D
        for name, first in (("q", 0), ("k", H * D), ("v", (H + G) * D)):
            found[name] = Place("qkv", case.dtype, lie[name], (case.S_q * row, D, row, 1), first)
    if case.lse:
        found["lse"] = _lse(case, lie["q"][:3])
    planes = {
        "bias": (case.bias, case.bias_walk),
        "mask": (DType.boolean if case.mask else None, case.mask_walk),
    }
    for name, (kind, walk) in planes.items():
        if kind is not None:
            found[name] = Place(name, kind, plane, walk.plane(plane, kind.itemsize), walk.offset)
    if case.alibi:
        strides = (case.num_heads + 1 if case.alibi_batch else 0, 1)
        found["alibi_slopes"] = Place("alibi_slopes", DType.float32, plane[:2], strides)
    if case.sinks:
        found["sinks"] = Place("sinks", DType.float32, (case.num_heads,), (1,))
    one_each = {"prefix_lengths": case.prefix, "kv_lengths": case.kv_lengths}
    for name, count, given in (
        *((n, case.batch, x) for n, x in one_each.items()),
        ("cu_seqlens_q", case.batch + 1, case.q_sequences),
        ("cu_seqlens_k", case.batch + 1, case.k_sequences),
    ):
        if given is not None:
            found[name] = Place(name, DType.int32, (count,), (1,))
    if case.page_size:
        shape = block_table(case).shape
        found["block_table"] = Place("block_table", DType.int32, shape, (shape[1] + 3, 1))
    return found


def rows(
    case: AttentionCase, name: str, walk: Walk, shape: tuple[int, int, int, int], dtype: DType
) -> Place:
    """q, k, v or out, in its view."""
    heads, width = shape[1], shape[3]
    sequences = case.k_sequences if name in "kv" else case.q_sequences
    if sequences is not None:
        whole = (1, heads, sum(sequences) + 2 * case.margin, width)
        row = walk.strides(whole, dtype.itemsize)[2]
        starts = offsets(sequences, case.margin)
        pieces = [Piece(b, 0, n, starts[b] * row) for b, n in enumerate(sequences)]
    elif name in "kv" and case.page_size:
        size, table = case.page_size, block_table(case)
        whole = (pages(case), heads, size, width)
        page = walk.strides(whole, dtype.itemsize)[0]
        pieces = [
            Piece(b, first, min(size, n - first), int(table[b, first // size]) * page)
            for b, n in enumerate(case.keys or ())
            for first in range(0, n, size)
        ]
    elif name in "kv" and case.kv_lengths is not None:
        whole = shape
        batch = walk.strides(whole, dtype.itemsize)[0]
        pieces = [Piece(b, 0, n, b * batch) for b, n in enumerate(case.kv_lengths)]
    elif case.scattered and not walk.broadcast:
        return scattered(name, walk, shape, dtype, seed="qkvo".index(name[0]))
    else:
        return Place(name, dtype, shape, (*walk.strides(shape, dtype.itemsize), 1), walk.offset)
    strides = (*walk.strides(whole, dtype.itemsize), 1)
    room = 0 if 0 in whole else 1 + sum((n - 1) * s for n, s in zip(whole, strides, strict=True))
    return Place(name, dtype, shape, strides, walk.offset, None, tuple(pieces), room)


def _lse(case: AttentionCase, shape: tuple[int, ...]) -> Place:
    if case.q_sequences is None:
        head = case.S_q + case.lse_gap
        return Place("lse", case.dtype.accumulator, shape, (case.num_heads * head, head, 1))
    starts = offsets(case.q_sequences, case.margin)
    head = starts[-1] + case.margin + case.lse_gap
    pieces = tuple(Piece(b, 0, n, starts[b]) for b, n in enumerate(case.q_sequences))
    return Place(
        "lse", case.dtype.accumulator, shape, (0, head, 1), 0, None, pieces, case.num_heads * head
    )


def variant(case: AttentionCase, x: Mapping[str, Array]) -> Variant:
    """What the case does beside softmax(scale·q·kᵀ)·v, of its ``values``."""
    return Variant(
        case.window or (None, None),
        case.prefix,
        case.softcap,
        x.get("alibi_slopes"),
        x.get("bias"),
        x.get("mask"),
        x.get("sinks"),
        case.q_sequences,
        case.keys,
    )
