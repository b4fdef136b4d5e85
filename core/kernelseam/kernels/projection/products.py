"""A projection's products as GEMMs: their operands, what is summed, and the strides of heads and
tokens; and what is launched after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from math import gcd
from typing import Any

from kernelseam.descriptors.common.validation import WIDE
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, Segment
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import (
    APPENDED,
    OutputProjectionProblem,
    QkvProjectionProblem,
)
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.cache.cache import CACHE
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import INT32, divide_up

Strides = tuple[int, ...]
"""(batch, row) or (batch, head, row)."""
FEW = 8
"""Columns of a product whose row sums alone are used."""


@dataclass(frozen=True)
class Product:
    """One launch."""

    name: str
    """The result."""
    problem: Any
    """A GemmProblem, or one of ``kernel``."""
    operands: Mapping[str, str]
    """Pointer parameter of the kernel → operand of the projection."""
    workspace: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0
    kernel: KernelDefinition | None = None
    """What computes it, where it is no product."""


def flatten_tokens(batch: int, S: int, *strides: Strides) -> tuple[int, int, list[int]]:
    """(batch, rows, row strides): all tokens as rows of one matrix where every operand has one
    row stride across entries, else those of each entry."""
    rows = [w[-1] for w in strides]
    if batch <= 1 or S <= 0:
        return 1, batch * S, rows
    if S == 1:
        entries = [w[0] for w in strides]
        return (1, batch, entries) if max(entries) < INT32 else (batch, S, rows)
    if all(w[0] == S * w[-1] for w in strides):
        return 1, batch * S, rows
    return batch, S, rows


def vector_at(vector: int, columns: int, dtype: DType) -> int:
    """Access width in bytes at every ``columns``-th element of a row."""
    return vector if columns * dtype.itemsize % WIDE == 0 else dtype.itemsize


def qkv(p: QkvProjectionProblem) -> Iterator[Product]:
    """One product, whose columns are heads; with an append, k and v go to the workspace, and from
    there to pages."""
    s, h = p.spec, p.heads
    batch, rows, (row,) = flatten_tokens(p.batch, h.tokens, p.input_strides)
    spec = GemmSpec(
        s.dtype,
        s.dtype_out,
        s.dtype.accumulator,
        False,
        True,
        "strided",
        s.vector_input,
        s.vector_weight,
        s.vector_out,
        bias=s.bias,
        heads=s.heads,
    )
    problem = GemmProblem(
        spec,
        rows,
        h.columns,
        p.hidden,
        batch,
        1,
        (p.input_strides[0], 0, row),
        (0, 0, p.weight_stride),
        (0, 0, 0),
        heads=h,
    )
    results = {"c": "q", "c1": "k", "c2": "v"}
    between = {c: p.between[name] for c, name in results.items() if name in p.between}
    yield Product(
        "q, k and v",
        problem,
        {
            "a": "input",
            "b": "weight",
            **{c: name for c, name in results.items() if c not in between},
            "bias": "bias",
            "cosines": "cos",
            "sines": "sin",
            "positions": "positions",
            "table": "block_table",
        },
        between,
        p.between_bytes,
    )
    if p.append is not None:
        appended = {parameter: name for name, parameter in APPENDED.items()}
        yield Product("append", p.append, appended, p.between, p.between_bytes, CACHE)


def output(p: OutputProjectionProblem) -> Iterator[Product]:
    """One product; where heads are not adjacent, a sum of one product per head."""
    s = p.spec
    batch, rows, row_strides = flatten_tokens(
        p.batch, p.S, p.attn_out_strides, p.out_strides, p.residual_strides
    )
    row, out_row, residual_row = row_strides
    spec = GemmSpec(
        s.dtype,
        s.dtype_out,
        s.dtype.accumulator,
        False,
        True,
        "strided",
        s.vector_attn_out,
        vector_at(s.vector_weight, p.head_dim, s.dtype) if s.apart else s.vector_weight,
        s.vector_out,
        s.bias,
        s.residual,
        s.vector_residual,
        s.apart,
    )
    problem = GemmProblem(
        spec,
        rows,
        p.hidden,
        p.head_dim,
        batch,
        p.num_heads,
        (*p.attn_out_strides[:2], row),
        (0, p.head_dim, p.weight_stride),
        (p.out_strides[0], 0, out_row),
        c_head_group=p.num_heads,
        residual_strides=(p.residual_strides[0], 0, residual_row),
    )
    yield Product(
        "out",
        problem,
        {"a": "attn_out", "b": "weight", "c": "out", "bias": "bias", "residual": "residual"},
    )


def qkv_bwd(p: QkvProjectionBwdProblem) -> Iterator[Product]:
    """One product for d_input, summed over heads, and one for d_weight with d_bias."""
    s, acc = p.spec, p.spec.dtype.accumulator
    strides = (p.dq_strides, p.dk_strides, p.dv_strides)
    # Heads that are adjacent in dq, dk and dv are one product.
    heads_per_product = (
        gcd(p.num_heads, p.kv_heads) if all(w[1] == p.head_dim for w in strides) else 1
    )
    dim, counts = (
        p.head_dim * heads_per_product,
        [n // heads_per_product for n in (p.num_heads, p.kv_heads, p.kv_heads)],
    )
    a = {"a": "dq", "a1": "dk", "a2": "dv"}

    def segments(rows: list[int]) -> tuple[Segment, ...]:
        return tuple(
            Segment(n, (w[0], w[1] * heads_per_product, row))
            for n, w, row in zip(counts, strides, rows, strict=True)
        )

    if s.d_input:
        batch, rows, (*row_strides, row) = flatten_tokens(p.batch, p.S, *strides, p.d_input_strides)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            vector_a=vector_at(s.vector_dqkv, dim, s.dtype),
            vector_b=s.vector_weight,
            vector_c=s.vector_d_input,
            summed=True,
            segmented=True,
        )
        yield Product(
            "d_input",
            GemmProblem(
                spec,
                rows,
                p.hidden,
                dim,
                batch,
                sum(counts),
                (0, 0, 0),
                (0, dim * p.weight_stride, p.weight_stride),
                (p.d_input_strides[0], 0, row),
                c_head_group=sum(counts),
                segments=segments(row_strides),
            ),
            {**a, "b": "weight", "c": "d_input"},
        )
    weight = bool(s.d_weight and p.hidden)
    if weight or s.d_bias:
        inputs = (p.input_strides,) if weight else ()
        batch, tokens, row_strides = flatten_tokens(p.batch, p.S, *strides, *inputs)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            True,
            vector_a=vector_at(s.vector_dqkv, dim, s.dtype),
            vector_b=s.vector_input,
            vector_c=s.vector_d_weight,
            summed=batch > 1,
            row_sums=s.d_bias,
            segmented=True,
        )
        problem = GemmProblem(
            spec,
            dim,
            p.hidden,
            tokens,
            batch,
            sum(counts),
            (0, 0, 0),
            (p.input_strides[0], 0, row_strides[-1]),
            (0, dim * p.d_weight_stride, p.d_weight_stride),
            c_batch_group=batch,
            sums_strides=(0, dim),
            segments=segments(row_strides[:3]),
        )
        operands = {**a, "b": "input", "c": "d_weight", "sums": "d_bias"}
        if weight:
            yield Product("d_weight", problem, operands)
        else:
            of_a = (p.dq_strides[0], 0, row_strides[0])
            yield _bias_gradient(problem, of_a, {**operands, "b": "dq"})


def output_bwd(p: OutputProjectionBwdProblem) -> Iterator[Product]:
    """One product for d_attn_out and one for d_weight with d_bias; where heads are not adjacent,
    one for each head."""
    s, acc = p.spec, p.spec.dtype.accumulator

    def heads(apart: bool, vector: int) -> tuple[int, int, int]:
        """Heads of a product and their columns, and how wide the rows of a weight may be accessed
        at each."""
        return (
            (p.num_heads, p.head_dim, vector_at(vector, p.head_dim, s.dtype))
            if apart
            else (1, p.width, vector)
        )

    if s.d_attn_out:
        count, dim, vector = heads(s.d_apart, s.vector_weight)
        batch, rows, (row, d_row) = flatten_tokens(
            p.batch, p.S, p.d_output_strides, p.d_attn_out_strides
        )
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            vector_a=s.vector_d_output,
            vector_b=vector,
            vector_c=s.vector_d_attn_out,
        )
        yield Product(
            "d_attn_out",
            GemmProblem(
                spec,
                rows,
                dim,
                p.hidden,
                batch,
                count,
                (p.d_output_strides[0], 0, row),
                (0, dim, p.weight_stride),
                (*p.d_attn_out_strides[:2], d_row),
            ),
            {"a": "d_output", "b": "weight", "c": "d_attn_out"},
        )
    weight = bool(s.d_weight and p.width)
    if weight or s.d_bias:
        count, dim, vector = heads(s.apart, s.vector_d_weight) if weight else (1, p.width, 16)
        others = (p.attn_out_strides,) if weight else ()
        batch, tokens, rows_of = flatten_tokens(p.batch, p.S, p.d_output_strides, *others)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            True,
            vector_a=s.vector_d_output,
            vector_b=s.vector_attn_out,
            vector_c=vector,
            summed=batch > 1,
            row_sums=s.d_bias,
        )
        of_a = (p.d_output_strides[0], 0, rows_of[0])
        problem = GemmProblem(
            spec,
            p.hidden,
            dim,
            tokens,
            batch,
            count,
            of_a,
            (*p.attn_out_strides[:2], rows_of[-1]),
            (0, dim, p.d_weight_stride),
            c_batch_group=batch,
        )
        operands = {"a": "d_output", "b": "attn_out", "c": "d_weight", "sums": "d_bias"}
        if weight:
            yield Product("d_weight", problem, operands)
        else:
            yield _bias_gradient(problem, of_a, {**operands, "b": "d_output"})


def _bias_gradient(
    weight_gradient: GemmProblem, a_strides: Strides, operands: Mapping[str, str]
) -> Product:
    """The product of a weight's gradient where only its row sums are used: B is a few columns of
    A's operand, and C goes to the workspace unread."""
    spec = weight_gradient.spec
    batch, head, row = a_strides
    problem = replace(
        weight_gradient,
        spec=replace(spec, vector_b=spec.vector_a, vector_c=16),
        N=min(weight_gradient.M, FEW),
        b_strides=(batch, head, row),
        c_strides=(0, weight_gradient.M * FEW * bool(weight_gradient.segments), FEW),
    )
    size = problem.results * problem.M * FEW * spec.dtype.itemsize
    read = {n: x for n, x in operands.items() if n != "c"}
    return Product("d_bias", problem, read, {"c": 0}, divide_up(size, 256) * 256)
