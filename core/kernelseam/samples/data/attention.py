"""An attention case's operands: seeded values, their memory, and the variant that the oracle
computes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernelseam.descriptors.attention.options import ScoreNumbers, ScoreOperands
from kernelseam.descriptors.common.options import operands_of, scalars_of
from kernelseam.dtypes import DType
from kernelseam.expressions.scores import ScoreExpression, score_expression
from kernelseam.ops.block_mask import block_mask
from kernelseam.oracle.formulas import Array, Variant
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.data import captured
from kernelseam.samples.data.memory import (
    Placement,
    RowSpan,
    placement,
    repeated_copy,
    scattered,
    unrepeated_shape,
)
from kernelseam.samples.data.scaled_rows import scaled_rows
from kernelseam.samples.mods import Extents, Mods, mods_of
from kernelseam.samples.operand_layout import OperandLayout

INVALID_PAGES = (-1, 2**31 - 1)
"""The block table's entries beyond the pages of a sequence."""
UNUSED_PAGES = 3
"""The number of pages that no block table refers to."""


def shapes(case: AttentionCase) -> dict[str, tuple[int, int, int, int]]:
    """[batch, head, row, column] of q, k, v and out; S_q and S_k are the longest sequence's."""
    B, H, G = case.batch, case.num_heads, case.kv_heads
    return {
        "q": (B, H, case.S_q, case.head_dim),
        "k": (B, G, case.S_k, case.key_width),
        "v": (B, G, case.S_k, case.value_dim),
        "out": (B, H, case.S_q, case.value_dim),
    }


def values(case: AttentionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Inputs by name; q, k, v, bias and mask are [batch, head, row, column] whatever their view."""
    operand_shapes, operand_layouts = shapes(case), {"q": case.q, "k": case.k, "v": case.v}
    drawn = {**operand_shapes, "k": (*operand_shapes["k"][:3], case.head_dim)}
    q, k, v = (
        rng.standard_normal(unrepeated_shape(drawn[name], x)) for name, x in operand_layouts.items()
    )
    shape_scores(q, k, case.data)
    if case.steps:
        step(q, k, case.steps, case.steps_every)
    if case.data == "faint":
        v[...] = np.where(k[..., 1:2] == k[..., 1].max(), 0, np.abs(v))
    if case.ramp:
        ramp(q, k)
    for b, n in enumerate(case.shared_pages):
        k[b, :, : n * case.page_size] = k[b - 1, :, : n * case.page_size]
        v[b, :, : n * case.page_size] = v[b - 1, :, : n * case.page_size]
    scales = _scales(case, rng) if case.scales else {}
    if scales:
        k /= key_scales(case, scales["k_scales"])[..., None]
    if "q_scales" in scales:
        q /= query_scales(case, scales["q_scales"])[..., None]
    if case.row_scale_block is not None:
        k = scaled_rows(k, case.value_dim, case.row_scale_block, rng)
    kinds = (case.q_dtype, case.kv_dtype, case.kv_dtype)
    inputs: dict[str, Array] = {
        name: repeated_copy(_converted(x, kind), operand_shapes[name])
        for name, x, kind in zip(operand_layouts, (q, k, v), kinds, strict=True)
    }
    inputs |= scales
    if case.latent:
        inputs["v"] = inputs["k"][..., : case.value_dim]
    plane = (case.batch, case.num_heads, case.S_q, case.S_k)
    if case.bias:
        inputs["bias"] = repeated_copy(
            _bias(case, unrepeated_shape(plane, case.bias_layout), rng), plane
        )
    if case.mask:
        inputs["mask"] = repeated_copy(
            _mask(case.mask, unrepeated_shape(plane, case.mask_layout), rng), plane
        )
    if case.alibi:
        steeper = (
            np.arange(1, case.batch + 1)[:, None] if case.alibi_batch else np.ones((case.batch, 1))
        )
        inputs["alibi_slopes"] = (steeper * case.alibi).astype(np.float32)
    if case.sinks:
        inputs["sinks"] = np.array(case.sinks, np.float32)
    for name, given in (("prefix_lengths", case.prefix), ("kv_lengths", case.kv_lengths)):
        if given is not None:
            inputs[name] = np.array(given, np.int32)
    for letter, lengths in (("q", case.q_sequences), ("k", case.k_sequences)):
        if lengths is not None:
            inputs[f"cu_seqlens_{letter}"] = np.array(offsets(lengths, case.margin), np.int32)
    if case.page_size:
        inputs["block_table"] = block_table(case).copy()
    if case.mods:
        inputs |= captured.inputs(expression(case).arrays)
    return inputs


def mods(case: AttentionCase) -> Mods:
    extents = Extents(case.batch, case.num_heads, case.S_q, case.S_k)
    return mods_of(case.mods, extents) if case.mods else Mods()


def expression(case: AttentionCase) -> ScoreExpression:
    """The functions of a case that has some, traced over their arrays on the host."""
    own = mods(case)
    if case.blocks is None:
        return score_expression(*own)
    extents: Any = own.mask_mod, case.batch, case.num_heads, case.S_q, case.S_k
    mask = block_mask(*extents, block_size=case.blocks)
    return score_expression(own.score_mod, block_mask=mask)


def _converted(x: Array, kind: DType) -> Array:
    """Numbers of a dtype; those beyond the range of 8 bits are its largest."""
    if kind.is_fp8:
        most = float(ml_dtypes.finfo(kind.numpy).max)
        x = np.clip(x, -most, most)
    return x.astype(kind.numpy)


def shape_scores(q: Array, k: Array, kind: str) -> None:
    """Give the scores the distribution ``AttentionCase.data``, in place, through column 1 of q and
    k."""
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
    """q[…,1] = √D for every ``every``-th query, else 0, and k[j,1] = the score of the last step at
    or before j."""
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
    # Beyond an entry's lengths the bias is never read.
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


def _scales(case: AttentionCase, rng: np.random.Generator) -> dict[str, Array]:
    """Scales as they lie in memory. k and q are divided by their own; those of blocks of v differ
    by up to 10⁴, more than the range of float16 allows to a weight."""
    shape = scale_shape(case)
    drawn = {"tensor": (1, 1), "heads": (1, shape[1])}.get(case.scales, shape)
    least = 1e-4 if case.scales == "blocks" else 0.1
    k, v = 2.0 ** rng.uniform(-3, 3, drawn), least ** rng.uniform(0, 1, drawn)
    result = {
        name: repeated_copy(x.astype(np.float32), shape)
        for name, x in (("k_scales", k), ("v_scales", v))
    }
    if case.dtype_q is not None:
        of_q = q_scale_shape(case)
        drawn = drawn if len(of_q) == 2 and len(drawn) == 2 else of_q
        q = 2.0 ** rng.uniform(-3, 3, drawn)
        result["q_scales"] = repeated_copy(q.astype(np.float32), of_q)
    return result


def q_scale_shape(case: AttentionCase) -> tuple[int, ...]:
    """[batch, KV head], or [batch, head, block]."""
    if case.q_scale_block is None:
        return case.batch, case.kv_heads
    outer, rows = case.batch, case.S_q
    if case.q_sequences is not None:
        outer, rows = 1, sum(case.q_sequences) + 2 * case.margin
    return outer, case.num_heads, -(-rows // case.q_scale_block)


def query_scales(case: AttentionCase, scales: Array) -> Array:
    """The scale of each query, [batch, head, S_q]; 1 for queries beyond an entry's."""
    whole = np.ones((case.batch, case.num_heads, case.S_q), np.float32)
    if case.q_scale_block is None:
        whole *= np.repeat(scales, case.num_heads // case.kv_heads, axis=1)[..., None]
        return whole
    starts = offsets(case.q_sequences, case.margin) if case.q_sequences is not None else ()
    for b in range(case.batch):
        n = case.S_q if case.q_sequences is None else case.q_sequences[b]
        outer, first = (0, starts[b]) if case.q_sequences is not None else (b, 0)
        whole[b, :, :n] = scales[outer][:, (first + np.arange(n)) // case.q_scale_block]
    return whole


def scale_shape(case: AttentionCase) -> tuple[int, ...]:
    """[batch, KV head], or [batch or page, KV head, block]."""
    if case.scale_block is None:
        return case.batch, case.kv_heads
    outer, rows = case.batch, case.S_k
    if case.k_sequences is not None:
        outer, rows = 1, sum(case.k_sequences) + 2 * case.margin
    elif case.page_size:
        outer, rows = pages(case), case.page_size
    return outer, case.kv_heads, -(-rows // case.scale_block)


def key_scales(case: AttentionCase, scales: Array) -> Array:
    """The scale of each key, [batch, KV head, S_k]; 1 for keys beyond an entry's."""
    whole = np.ones((case.batch, case.kv_heads, case.S_k), np.float32)
    starts = offsets(case.k_sequences, case.margin) if case.k_sequences is not None else ()
    for b in range(case.batch):
        n = case.S_k if case.keys is None else case.keys[b]
        j = np.arange(n)
        if case.scale_block is None:
            whole[b, :, :n] = scales[b][:, None]
        elif case.k_sequences is not None:
            whole[b, :, :n] = scales[0][:, (starts[b] + j) // case.scale_block]
        elif case.page_size:
            at = block_table(case)[b, j // case.page_size]
            whole[b, :, :n] = scales[at, :, j % case.page_size // case.scale_block].T
        else:
            whole[b, :, :n] = scales[b][:, j // case.scale_block]
    return whole


def offsets(lengths: tuple[int, ...], margin: int) -> list[int]:
    """Where each packed sequence begins, and where the last one ends."""
    return [*accumulate(lengths, initial=margin)]


@lru_cache(maxsize=8)
def block_table(case: AttentionCase) -> npt.NDArray[np.int32]:
    """[batch, the pages of S_k keys and two more]: shuffled pages, then INVALID_PAGES."""
    size, lengths = case.page_size, case.keys or ()
    used = [-(-n // size) for n in lengths]
    width = -(-case.S_k // size) + 2
    table = np.resize(np.array(INVALID_PAGES, np.int32), (case.batch, width))
    order = np.random.default_rng(zlib.crc32(case.name.encode()) + 1).permutation(
        sum(used) + UNUSED_PAGES
    )
    for b, n in enumerate(used):
        table[b, :n], order = order[:n], order[n:]
    for b, n in enumerate(case.shared_pages):
        table[b, :n] = table[b - 1, :n]
    return table


def pages(case: AttentionCase) -> int:
    return sum(-(-n // case.page_size) for n in case.keys or ()) + UNUSED_PAGES


def placements(case: AttentionCase) -> dict[str, Placement]:
    operand_shapes, placements, plane = (
        shapes(case),
        {},
        (case.batch, case.num_heads, case.S_q, case.S_k),
    )
    for name, operand_layout in (("q", case.q), ("k", case.k), ("v", case.v), ("out", case.out)):
        placements[name] = rows(
            case,
            name,
            operand_layout,
            operand_shapes[name],
            {"q": case.q_dtype, "out": case.out_dtype}.get(name, case.kv_dtype),
        )
    if case.packed:
        H, G, D = case.num_heads, case.kv_heads, case.head_dim
        row = (H + 2 * G) * D
        for name, first in (("q", 0), ("k", H * D), ("v", (H + G) * D)):
            placements[name] = Placement(
                "qkv", case.dtype, operand_shapes[name], (case.S_q * row, D, row, 1), first
            )
    if case.latent:
        placements["v"] = replace(placements["k"], shape=operand_shapes["v"])
    if case.lse:
        placements["lse"] = _lse(case, operand_shapes["q"][:3])
    planes = {
        "bias": (case.bias, case.bias_layout),
        "mask": (DType.boolean if case.mask else None, case.mask_layout),
    }
    for name, (kind, operand_layout) in planes.items():
        if kind is not None:
            placements[name] = Placement(
                name, kind, plane, operand_layout.plane(plane, kind.itemsize), operand_layout.offset
            )
    if case.alibi:
        strides = (case.num_heads + 1 if case.alibi_batch else 0, 1)
        placements["alibi_slopes"] = Placement("alibi_slopes", DType.float32, plane[:2], strides)
    if case.sinks:
        placements["sinks"] = Placement("sinks", DType.float32, (case.num_heads,), (1,))
    if case.scales:
        of_scales = dict.fromkeys(("k_scales", "v_scales"), scale_shape(case))
        if case.dtype_q is not None:
            of_scales["q_scales"] = q_scale_shape(case)
        for name, extents in of_scales.items():
            steps = tuple(math.prod(extents[i + 1 :]) + (i == 0) for i in range(len(extents)))
            placements[name] = Placement(name, DType.float32, extents, steps)
    one_each = {"prefix_lengths": case.prefix, "kv_lengths": case.kv_lengths}
    for name, count, given in (
        *((n, case.batch, x) for n, x in one_each.items()),
        ("cu_seqlens_q", case.batch + 1, case.q_sequences),
        ("cu_seqlens_k", case.batch + 1, case.k_sequences),
    ):
        if given is not None:
            placements[name] = Placement(name, DType.int32, (count,), (1,))
    if case.page_size:
        shape = block_table(case).shape
        placements["block_table"] = Placement("block_table", DType.int32, shape, (shape[1] + 3, 1))
    return placements | captured.placements(expression(case).arrays if case.mods else ())


def rows(
    case: AttentionCase,
    name: str,
    operand_layout: OperandLayout,
    shape: tuple[int, int, int, int],
    dtype: DType,
) -> Placement:
    """q, k, v or out, in its view."""
    heads, width = shape[1], shape[3]
    sequences = case.k_sequences if name in "kv" else case.q_sequences
    if sequences is not None:
        whole = (1, heads, sum(sequences) + 2 * case.margin, width)
        row = operand_layout.strides(whole, dtype.itemsize)[2]
        starts = offsets(sequences, case.margin)
        row_spans = [RowSpan(b, 0, n, starts[b] * row) for b, n in enumerate(sequences)]
    elif name in "kv" and case.page_size:
        size, table = case.page_size, block_table(case)
        whole = (pages(case), heads, size, width)
        page = operand_layout.strides(whole, dtype.itemsize)[0]
        row_spans = [
            RowSpan(b, first, min(size, n - first), int(table[b, first // size]) * page)
            for b, n in enumerate(case.keys or ())
            for first in range(0, n, size)
        ]
    elif name in "kv" and case.kv_lengths is not None:
        whole = shape
        batch = operand_layout.strides(whole, dtype.itemsize)[0]
        row_spans = [RowSpan(b, 0, n, b * batch) for b, n in enumerate(case.kv_lengths)]
    elif case.scattered and not operand_layout.broadcast:
        return scattered(name, operand_layout, shape, dtype, seed="qkvo".index(name[0]))
    else:
        return placement(name, operand_layout, shape, dtype)
    strides = (*operand_layout.strides(whole, dtype.itemsize), 1)
    min_elements = (
        0 if 0 in whole else 1 + sum((n - 1) * s for n, s in zip(whole, strides, strict=True))
    )
    return Placement(
        name, dtype, shape, strides, operand_layout.offset, None, tuple(row_spans), min_elements
    )


def _lse(case: AttentionCase, shape: tuple[int, ...]) -> Placement:
    if case.q_sequences is None:
        head = case.S_q + case.lse_gap
        return Placement("lse", case.dtype.accumulator, shape, (case.num_heads * head, head, 1))
    starts = offsets(case.q_sequences, case.margin)
    head = starts[-1] + case.margin + case.lse_gap
    row_spans = tuple(RowSpan(b, 0, n, starts[b]) for b, n in enumerate(case.q_sequences))
    return Placement(
        "lse",
        case.dtype.accumulator,
        shape,
        (0, head, 1),
        0,
        None,
        row_spans,
        case.num_heads * head,
    )


def variant(case: AttentionCase, x: Mapping[str, Array]) -> Variant:
    """The case's options beyond softmax(scale·q·kᵀ)·v, as the oracle takes them; ``x``: its
    ``values``."""
    given: dict[str, Any] = {n: x[n] for n in operands_of(ScoreOperands) if n in x}
    given |= {n: getattr(case, n) for n in scalars_of(ScoreNumbers)}
    given |= {n: key_scales(case, x[n]) for n in ("k_scales", "v_scales") if n in x}
    if "q_scales" in x:
        given["q_scales"] = query_scales(case, x["q_scales"])
    return Variant(
        window=case.window or (None, None),
        q_lengths=case.q_sequences,
        rounded_keys=case.row_scale_block is not None,
        **given | {"kv_lengths": case.keys} | mods(case)._asdict(),
    )
