"""ONNX's cases of its operator Attention (backend tests of opset 23): heads of equal and other
numbers and sizes, causal from the top left, masks, softcap, and keys of the past."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks.judging.case import Case

S_Q, S_K, PAST, DIM = 4, 6, 12, 8
KINDS = {"": (3, 3, 8), "_gqa": (9, 3, 8), "_diff_heads_sizes": (3, 3, 10)}
"""Heads, heads of keys, and the head dim of values."""
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "_scaled": {"scale": 1e-2},
    "_causal": {"causal": "top left"},
    "_softcap": {"softcap": 2.0},
    "_attn_mask": {"bias": (S_Q, S_K)},
    "_attn_mask_3d": {"bias": (2, 1, S_Q, S_K)},
    "_attn_mask_4d": {"bias": (2, 3, S_Q, S_K)},
    "_attn_mask_3d_causal": {"bias": (2, 1, S_Q, S_K), "causal": "top left"},
    "_attn_mask_4d_causal": {"bias": (2, 3, S_Q, S_K), "causal": "top left"},
    "_attn_mask_bool": {"mask": (S_Q, S_K)},
    "_attn_mask_bool_4d": {"mask": (2, 3, S_Q, S_K)},
    "_with_past_and_present": {"bias": (S_Q, S_K + PAST)},
}


def cases() -> Iterator[Case]:
    """Those of four axes and those of three, which are the same attentions over other strides."""
    for (kind, (heads, kv_heads, width)), (what, options) in product(
        KINDS.items(), OPTIONS.items()
    ):
        given = dict(options)
        if heads != 3 and "4d" in what:
            continue
        keys = S_K + PAST if "past" in what else S_K
        for axes, dtype in (("4d", "f32"), ("3d", "f32"), ("4d", "f16")):
            end = "_fp16" if dtype == "f16" else ""
            yield Case(
                f"test_attention_{axes}{kind}{what}{end}",
                (2, heads, S_Q, DIM),
                (2, kv_heads, keys, DIM),
                (2, kv_heads, keys, width),
                dtype,
                **given,
            )
