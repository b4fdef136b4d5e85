"""Offsets of 32 bits, planted in the shared kernels, and the case of large_offsets.py that each is
wrong in.

As in mutants.py, every row is bound to a few words of a source; ``case`` is a name of
large_offsets.CASES.
"""

from __future__ import annotations

from mutant import ATTENTION, BASE, FORWARD, GEMM, Mutant


def _mutant(name: str, place: str, find: str, plant: str, case: str) -> Mutant:
    return Mutant(f"far-{name}", place, find, plant, case, "", "an offset is cut off at 32 bits")


FAR_MUTANTS = (
    _mutant(
        "batch",
        ATTENTION,
        "return base + batch * batch_stride + head * head_stride;",
        "return base + (int)(batch * batch_stride) + head * head_stride;",
        "q-batches",
    ),
    _mutant("page", BASE, "table[n] * page_stride", "(int)(table[n] * page_stride)", "k-pages"),
    _mutant(
        "lse",
        FORWARD,
        "const i64 at = (i64)there.batch * lse.batch",
        "const int at = (i64)there.batch * lse.batch",
        "lse-batches",
    ),
    _mutant(
        "backward-entry",
        ATTENTION,
        "operand.base += batch * operand.batch",
        "operand.base += (int)(batch * operand.batch)",
        "bwd-dq-batches",
    ),
    _mutant(
        "written-page", GEMM, "entry * operand.batch", "(int)(entry * operand.batch)", "qkv-k-pages"
    ),
    _mutant(
        "merged-part", ATTENTION, "o + n * outs_part", "o + (int)(n * outs_part)", "merge-parts"
    ),
    _mutant(
        "head",
        ATTENTION,
        "return base + batch * batch_stride + head * head_stride;",
        "return base + batch * batch_stride + (int)(head * head_stride);",
        "k-heads",
    ),
    _mutant(
        "row",
        BASE,
        "T* row(int i) const { return base + (i64)i * stride; }",
        "T* row(int i) const { return base + (int)((i64)i * stride); }",
        "q-rows",
    ),
    _mutant(
        "first-of-a-sequence",
        ATTENTION,
        "return base + (i64)first * row + head",
        "return base + (int)((i64)first * row) + head",
        "q-packed",
    ),
    _mutant(
        "bias",
        ATTENTION,
        "{base + b * batch + h * head, head,",
        "{base + (int)(b * batch) + h * head, head,",
        "bias-batches",
    ),
    _mutant(
        "bias-row",
        ATTENTION,
        "base[h * head + (i64)i * row + (i64)j * column]",
        "base[(int)(h * head + (i64)i * row + (i64)j * column)]",
        "bias-rows",
    ),
    _mutant(
        "mask",
        ATTENTION,
        "{base + b * batch + h * head, head,",
        "{base + b * batch + (int)(h * head), head,",
        "mask-heads",
    ),
    _mutant(
        "backward-head",
        ATTENTION,
        "{base + head * head_stride, row}",
        "{base + (int)(head * head_stride), row}",
        "bwd-dk-heads",
    ),
    _mutant(
        "bias-gradient",
        ATTENTION,
        "dbias.base + h * dbias.head",
        "dbias.base + (int)(h * dbias.head)",
        "bwd-dbias-f32-heads",
    ),
    _mutant(
        "summed-bias-gradient",
        ATTENTION,
        "out[i0 * out0 + i1 * out1 + i2 * out2 + i3 * out3]",
        "out[(int)(i0 * out0 + i1 * out1 + i2 * out2 + i3 * out3)]",
        "bwd-dbias-heads",
    ),
    _mutant(
        "lse-read",
        ATTENTION,
        "lse.base[h * lse.head + i0 + t]",
        "lse.base[(int)(h * lse.head) + i0 + t]",
        "bwd-lse-heads",
    ),
    _mutant(
        "row-delta",
        ATTENTION,
        "x = dout + batch * dout_batch",
        "x = dout + (int)(batch * dout_batch)",
        "bwd-dout-batches",
    ),
    _mutant(
        "any-order",
        ATTENTION,
        "(KS_PACKED ? (i64)first * dq_row : batch * dq_batch)",
        "(int)(KS_PACKED ? (i64)first * dq_row : batch * dq_batch)",
        "bwd-any-order-dq-batches",
    ),
)
OFTEN = 3
"""So many of them, the first, are run whenever tests are."""
