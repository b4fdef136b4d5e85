"""A projection's products as GEMMs: which operand is whose, what is summed, and where heads and
tokens lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd

from kernelseam.descriptors.common.validation import WIDE
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec, Segment
from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.dtypes import DType
from kernelseam.kernels.elements import INT32, divide_up

Strides = tuple[int, ...]
"""(batch, row) or (batch, head, row)."""
FEW = 8
"""Columns of a product that is made for its row sums alone."""


@dataclass(frozen=True)
class Product:
    """One launch."""

    name: str
    """What it makes."""
    problem: GemmProblem
    operands: Mapping[str, str]
    """The kernel's pointer parameters, and whose memory they take."""
    workspace: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0


def folded(batch: int, S: int, *walks: Strides) -> tuple[int, int, list[int]]:
    """(batch, rows, row strides): all tokens as rows of one matrix where every walk steps over them
    evenly, else those of each entry."""
    rows = [w[-1] for w in walks]
    if batch <= 1 or S <= 0:
        return 1, batch * S, rows
    if S == 1:
        entries = [w[0] for w in walks]
        return (1, batch, entries) if max(entries) < INT32 else (batch, S, rows)
    if all(w[0] == S * w[-1] for w in walks):
        return 1, batch * S, rows
    return batch, S, rows


def every(vector: int, columns: int, dtype: DType) -> int:
    """How wide rows may be accessed from every ``columns``-th element on."""
    return vector if columns * dtype.itemsize % WIDE == 0 else dtype.itemsize


def qkv(p: QkvProjectionProblem) -> Iterator[Product]:
    """One product, whose columns are heads."""
    s, h = p.spec, p.heads
    batch, rows, (row,) = folded(p.batch, h.tokens, p.input_strides)
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
    yield Product(
        "q, k and v",
        problem,
        {
            "a": "input",
            "b": "weight",
            "c": "q",
            "c1": "k",
            "c2": "v",
            "bias": "bias",
            "cosines": "cos",
            "sines": "sin",
            "positions": "positions",
            "table": "block_table",
        },
    )


def output(p: OutputProjectionProblem) -> Iterator[Product]:
    """One product; where heads lie apart from each other, one a head, summed."""
    s = p.spec
    batch, rows, found = folded(p.batch, p.S, p.attn_out_strides, p.out_strides, p.residual_strides)
    row, out_row, residual_row = found
    spec = GemmSpec(
        s.dtype,
        s.dtype_out,
        s.dtype.accumulator,
        False,
        True,
        "strided",
        s.vector_attn_out,
        every(s.vector_weight, p.head_dim, s.dtype) if s.apart else s.vector_weight,
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
    walks = (p.dq_strides, p.dk_strides, p.dv_strides)
    # Heads that lie side by side in all three are taken together.
    together = gcd(p.num_heads, p.kv_heads) if all(w[1] == p.head_dim for w in walks) else 1
    dim, counts = (
        p.head_dim * together,
        [n // together for n in (p.num_heads, p.kv_heads, p.kv_heads)],
    )
    a = {"a": "dq", "a1": "dk", "a2": "dv"}

    def segments(rows: list[int]) -> tuple[Segment, ...]:
        return tuple(
            Segment(n, (w[0], w[1] * together, row))
            for n, w, row in zip(counts, walks, rows, strict=True)
        )

    if s.d_input:
        batch, rows, (*found, row) = folded(p.batch, p.S, *walks, p.d_input_strides)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            vector_a=every(s.vector_dqkv, dim, s.dtype),
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
                segments=segments(found),
            ),
            {**a, "b": "weight", "c": "d_input"},
        )
    if s.d_weight and p.hidden:
        batch, tokens, (*found, row) = folded(p.batch, p.S, *walks, p.input_strides)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            True,
            vector_a=every(s.vector_dqkv, dim, s.dtype),
            vector_b=s.vector_input,
            vector_c=s.vector_d_weight,
            summed=batch > 1,
            row_sums=s.d_bias,
            segmented=True,
        )
        yield Product(
            "d_weight",
            GemmProblem(
                spec,
                dim,
                p.hidden,
                tokens,
                batch,
                sum(counts),
                (0, 0, 0),
                (p.input_strides[0], 0, row),
                (0, dim * p.d_weight_stride, p.d_weight_stride),
                c_batch_group=batch,
                sums_strides=(0, dim),
                segments=segments(found),
            ),
            {**a, "b": "input", "c": "d_weight", "sums": "d_bias"},
        )
    elif s.d_bias:
        batch, tokens, found = folded(p.batch, p.S, *walks)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            True,
            vector_a=every(s.vector_dqkv, dim, s.dtype),
            vector_b=every(s.vector_dqkv, dim, s.dtype),
            summed=batch > 1,
            row_sums=s.d_bias,
            segmented=True,
        )
        few = min(dim, FEW)
        yield _sums_alone(
            GemmProblem(
                spec,
                dim,
                few,
                tokens,
                batch,
                sum(counts),
                (0, 0, 0),
                (p.dq_strides[0], 0, found[0]),
                (0, dim * FEW, FEW),
                c_batch_group=batch,
                sums_strides=(0, dim),
                segments=segments(found),
            ),
            {**a, "b": "dq", "sums": "d_bias"},
        )


def output_bwd(p: OutputProjectionBwdProblem) -> Iterator[Product]:
    """One product for d_attn_out and one for d_weight with d_bias; where heads lie apart, one
    result for each."""
    s, acc = p.spec, p.spec.dtype.accumulator

    def heads(apart: bool, vector: int) -> tuple[int, int, int]:
        """Heads of a product and their columns, and how wide the rows of a weight may be accessed
        at each."""
        return (
            (p.num_heads, p.head_dim, every(vector, p.head_dim, s.dtype))
            if apart
            else (1, p.width, vector)
        )

    if s.d_attn_out:
        count, dim, vector = heads(s.d_apart, s.vector_weight)
        batch, rows, (row, d_row) = folded(p.batch, p.S, p.d_output_strides, p.d_attn_out_strides)
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
    if s.d_weight and p.width:
        count, dim, vector = heads(s.apart, s.vector_d_weight)
        batch, tokens, (row, b_row) = folded(p.batch, p.S, p.d_output_strides, p.attn_out_strides)
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
        yield Product(
            "d_weight",
            GemmProblem(
                spec,
                p.hidden,
                dim,
                tokens,
                batch,
                count,
                (p.d_output_strides[0], 0, row),
                (*p.attn_out_strides[:2], b_row),
                (0, dim, p.d_weight_stride),
                c_batch_group=batch,
            ),
            {"a": "d_output", "b": "attn_out", "c": "d_weight", "sums": "d_bias"},
        )
    elif s.d_bias:
        batch, tokens, (row,) = folded(p.batch, p.S, p.d_output_strides)
        walk = (p.d_output_strides[0], 0, row)
        spec = GemmSpec(
            s.dtype,
            s.dtype,
            acc,
            True,
            vector_a=s.vector_d_output,
            vector_b=s.vector_d_output,
            summed=batch > 1,
            row_sums=s.d_bias,
        )
        yield _sums_alone(
            GemmProblem(
                spec,
                p.hidden,
                min(p.hidden, FEW),
                tokens,
                batch,
                1,
                walk,
                walk,
                (0, 0, FEW),
                c_batch_group=batch,
            ),
            {"a": "d_output", "b": "d_output", "sums": "d_bias"},
        )


def _sums_alone(problem: GemmProblem, operands: Mapping[str, str]) -> Product:
    """A product for its row sums: of what is summed with a few columns of the same, which nobody
    reads."""
    size = problem.results * problem.M * FEW * problem.spec.dtype.itemsize
    return Product("d_bias", problem, operands, {"c": 0}, divide_up(size, 256) * 256)
