"""The fields of the attention forward's descriptors beside its options, and the names of its
operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from kernelseam.descriptors.attention.options import (
    LatentOption,
    PackedOperands,
    PageOperands,
    PrefixOption,
    ResultOptions,
    ScaleOptions,
    ScoreOperands,
    ScoreScalars,
)
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.options import operands_of
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.dtypes import DType
from kernelseam.expressions.scores import ScoreExpression
from kernelseam.frozen import dataclass

ROWS = ("q", "k", "v", "out")


@dataclass(frozen=True, eq=False, kw_only=True)
class CommonFields(ResultOptions, ScoreOperands, ScoreScalars):
    """What descriptors over strides and over lists have alike, as they document it; nothing is
    validated here."""

    batch: int
    num_heads: int
    S_q: int
    S_k: int
    head_dim: int
    kv_heads: int | None = None
    value_dim: int | None = None
    lse: object = field(default=None, repr=False)
    dtype: DType | str | None = None
    dtype_out: DType | str | None = None
    dtype_bias: DType | str | None = None
    stride_q_row: int | None = None
    stride_k_row: int | None = None
    stride_v_row: int | None = None
    stride_out_row: int | None = None
    stride_lse_batch: int | None = None
    stride_lse_head: int | None = None
    stride_bias_batch: int | None = None
    stride_bias_head: int | None = None
    stride_bias_row: int | None = None
    stride_bias_column: int | None = None
    stride_mask_batch: int | None = None
    stride_mask_head: int | None = None
    stride_mask_row: int | None = None
    stride_mask_column: int | None = None
    stride_alibi_batch: int | None = None
    stride_alibi_head: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionFields(
    LatentOption,
    PrefixOption,
    PageOperands,
    PackedOperands,
    ScaleOptions,
    CommonFields,
    StridedDescriptor[AttentionProblem],
):
    """The fields of ``Attention``."""

    q: object = field(default=None, repr=False)
    k: object = field(default=None, repr=False)
    v: object = field(default=None, repr=False)
    out: object = field(default=None, repr=False)
    total_q: int | None = None
    total_k: int | None = None
    pages: int | None = None
    page_size: int | None = None
    table_width: int | None = None
    dtype_q: DType | str | None = None
    dtype_kv: DType | str | None = None
    stride_q_batch: int | None = None
    stride_q_head: int | None = None
    stride_k_batch: int | None = None
    stride_k_head: int | None = None
    stride_v_batch: int | None = None
    stride_v_head: int | None = None
    stride_out_batch: int | None = None
    stride_out_head: int | None = None
    stride_q_scales_batch: int | None = None
    stride_q_scales_head: int | None = None
    stride_q_scales_block: int | None = None
    stride_k_scales_batch: int | None = None
    stride_k_scales_head: int | None = None
    stride_k_scales_block: int | None = None
    stride_v_scales_batch: int | None = None
    stride_v_scales_head: int | None = None
    stride_v_scales_block: int | None = None
    stride_table_row: int | None = None
    expression: ScoreExpression | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(ROWS, ("batch", "head", "row")),
        "lse": ("batch", "head"),
        **dict.fromkeys(("bias", "mask"), ("batch", "head", "row", "column")),
        "alibi_slopes": ("batch", "head"),
        **dict.fromkeys(("q_scales", "k_scales", "v_scales"), ("batch", "head", "block")),
        "block_table": ("row",),
    }
    CALLED: ClassVar[Mapping[str, str]] = {"alibi_slopes": "alibi", "block_table": "table"}


OPTIONAL = operands_of(AttentionFields)
"""Optional operands; address 0 says that they will be bound."""
