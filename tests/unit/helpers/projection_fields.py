"""Fields of small projections, as tests of their descriptors and products give them."""

from __future__ import annotations

from typing import Any

OUT: dict[str, Any] = {
    "batch": 2,
    "S": 5,
    "hidden": 24,
    "num_heads": 4,
    "head_dim": 8,
    "dtype": "float16",
}
QKV: dict[str, Any] = {**OUT, "kv_heads": 2}
ALL: dict[str, Any] = {"d_input": 0, "d_weight": 0, "d_bias": 0}
OUT_ALL: dict[str, Any] = {"d_attn_out": 0, "d_weight": 0, "d_bias": 0}
