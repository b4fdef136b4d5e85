"""Problems of attention forward, for kernel definitions."""

from __future__ import annotations

from typing import Any

from kernelseam.descriptors import Attention
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.dtypes import DType


def attention_problem(
    S_q: int = 4096,
    S_k: int = 4096,
    heads: int = 16,
    kv_heads: int = 16,
    batch: int = 4,
    page_size: int = 16,
    **spec: Any,
) -> AttentionProblem:
    """Operands [batch, sequence, head, dim], row-major; by default bfloat16 of head dim 128 with an
    LSE. ``spec``: fields of ``AttentionSpec``. Pages are "nhd", and each entry has its own."""
    s = AttentionSpec(
        **{"dtype": DType.bfloat16, "head_dim": 128, "value_dim": 128, "lse": True, **spec}
    )
    d, v = s.head_dim, s.value_dim
    packed = s.q_view == "packed"
    paged = s.kv_view == "paged"
    table_width = -(-S_k // page_size) * paged
    k_rows = page_size if paged else S_k
    return AttentionProblem(
        s,
        batch,
        heads,
        kv_heads,
        S_q,
        S_k,
        (S_q * heads * d, d, heads * d),
        (k_rows * kv_heads * d, d, kv_heads * d),
        (k_rows * kv_heads * v, v, kv_heads * v),
        (S_q * heads * v, v, heads * v),
        (heads * S_q, S_q),
        d**-0.5,
        left=7 if s.window else None,
        right=0 if s.window else None,
        softcap=30.0 if s.softcap else 0.0,
        total_q=batch * S_q if packed else 0,
        total_k=batch * S_k if packed else 0,
        pages=batch * table_width,
        page_size=page_size * paged,
        table_width=table_width,
        table_stride=table_width,
    )


def latent_attention(row: int = 576, **changes: Any) -> Attention:
    """Two entries of 16 query heads and 64 latent keys of so many elements a row."""
    fields: dict[str, Any] = {
        "batch": 2,
        "num_heads": 16,
        "kv_heads": 1,
        "S_q": 1,
        "S_k": 64,
        "head_dim": 576,
        "value_dim": 512,
        "dtype": "bfloat16",
        "stride_v_row": row,
        "stride_v_batch": 64 * row,
        "latent": True,
    }
    return Attention(**{**fields, **changes})
