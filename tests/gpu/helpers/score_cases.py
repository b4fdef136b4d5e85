"""Parity cases of Hopper's attention whose scores or masks are computed by element: two tiles a
block and more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from kernelseam.dtypes import DType
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import NAN, InjectedValue
from kernelseam.samples.mods import MODS, in_files
from kernelseam.samples.operand_layout import OperandLayout

_HIDDEN = (
    InjectedValue("v", NAN, (None, None, 100, 3)),
    InjectedValue("v", NAN, (0, None, 40, None)),
)
_SLOPES = tuple(0.5 ** (1 + h % 12) for h in range(24))
_WINDOW = {"window": (70, 9), "sinks": _SLOPES}
_NEAR = np.arange(512) % 256 < 90


def distances(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Of a block, a range of the array that its queries and its keys make together."""
    return _NEAR[q - kv]


def scores() -> Iterator[AttentionCase]:
    many: dict[str, Any] = {"num_heads": 132, "kv_heads": 132, "batch": 1, "S_q": 200, "S_k": 300}
    for name in MODS:
        yield case("bf16-128", f"scores-{name}", mods=name, **many)
    few = {**many, "num_heads": 24, "kv_heads": 12}
    by_distance = in_files(None, f"{__file__}:distances")
    yield case("bf16-128", "scores-distances", mods=by_distance, **few)
    for name in ("documents", "buckets", "alibi", "window", "soft_cap"):
        yield case("f16-104/128", f"scores-{name}", mods=name, **few)
    yield from _biases("bf16-128", few)
    yield from _masks("bf16-128", few)
    yield from _pages("bf16-128", few)
    for dim in (40, 64, 96):
        narrow: dict[str, Any] = {"mask": "random", "alibi": _SLOPES}
        yield case(f"f16-{dim}", "scores-mask-slopes", **narrow, **few)
        yield case(f"bf16-{dim}-causal", "scores-bias", bias=DType.bfloat16, **few)
        yield case(f"bf16-{dim}", "scores-documents", mods="documents", **few)
    for kind in ("bf16-128", "bf16-128-causal"):
        yield case(kind, "scores-slopes", alibi=_SLOPES, **few)
        yield case(kind, "scores-slopes-steep", alibi=tuple(8 * x for x in _SLOPES), **few)
    yield case("bf16-128", "scores-slopes-up", alibi=tuple(-x for x in _SLOPES), **few)
    yield case("bf16-128-causal", "scores-prefix", prefix=(170,), **few)
    for mod in ("documents", "window"):
        yield case("bf16-128", f"scores-{mod}-nan-in-v", mods=mod, injected=_HIDDEN, **few)
    far = {**few, "num_heads": 2, "kv_heads": 1, "S_q": 2000, "S_k": 5000}
    yield case("bf16-128", "scores-far", mods="blocks_of_documents", **far)


def _biases(kind: str, few: dict[str, Any]) -> Iterator[AttentionCase]:
    own, f32 = DType.bfloat16, DType.float32
    for bias, axes in ((own, ""), (own, "bh"), (f32, "h"), (own, "bhr"), (own, "bc")):
        layout = OperandLayout(broadcast=axes)
        for causal in ("", "-causal"):
            name = f"scores-bias-{bias}-{axes or 'each'}"
            yield case(kind + causal, name, bias=bias, bias_layout=layout, **few)
    odd = {**few, "S_k": 301}
    yield case(kind, "scores-bias-odd", bias=own, **odd)
    # Rows at multiples of 16 bytes for every second head, and not at these from the base.
    between = OperandLayout("brh", aligned=False, offset=4)
    yield case(kind, "scores-bias-between", bias=own, bias_layout=between, **few)
    for data in ("holes", "voids", "low"):
        yield case(kind, f"scores-bias-{data}", bias=f32, bias_data=data, **few)
    yield case(kind, "scores-bias-window", bias=own, **_WINDOW, **few)
    yield case(kind, "scores-bias-documents", bias=own, mods="documents", **few)
    steps = ((0, 78.0), (200, 0.0))
    yield case(kind, "scores-rising", bias=own, steps=steps, **few)


def _pages(kind: str, few: dict[str, Any]) -> Iterator[AttentionCase]:
    """Biases and masks over keys in pages, which are counted within an entry."""
    pages: dict[str, Any] = {**few, "batch": 3, "kv_lengths": (300, 41, 177), "page_size": 16}
    own, f32 = DType.bfloat16, DType.float32
    for bias, axes in ((own, ""), (own, "b"), (f32, "bh"), (own, "bhr")):
        layout = OperandLayout(broadcast=axes)
        for causal in ("", "-causal"):
            name = f"scores-pages-bias-{bias}-{axes or 'each'}"
            yield case(kind + causal, name, bias=bias, bias_layout=layout, **pages)
    for mask in ("random", "rows", "keys"):
        yield case(kind, f"scores-pages-mask-{mask}", mask=mask, **pages)
    yield case(f"{kind}-causal", "scores-pages-mask-bias", mask="random", bias=own, **pages)
    yield case(kind, "scores-pages-bias-mod", bias=own, mods="documents", **pages)
    yield case(kind, "scores-pages-mask-mod", mask="random", mods="alibi", **pages)
    packed = {**pages, "q_sequences": (200, 0, 33)}
    yield case(f"{kind}-causal", "scores-pages-bias-packed", bias=own, **packed)
    yield case("f16-64", "scores-pages-bias", bias=DType.float16, **{**pages, "page_size": 8})
    yield case("bf16-256", "scores-pages-mask", mask="random", **{**pages, "page_size": 64})


def _masks(kind: str, few: dict[str, Any]) -> Iterator[AttentionCase]:
    own, odd = DType.bfloat16, {**few, "S_k": 301}
    for mask in ("random", "rows", "keys", "all"):
        yield case(kind, f"scores-mask-{mask}", mask=mask, **few)
    for axes in ("b", "bh", "bhr", "bc", "h"):
        layout = OperandLayout(broadcast=axes)
        yield case(kind, f"scores-mask-of-{axes}", mask="random", mask_layout=layout, **few)
    gaps = OperandLayout(gaps=(0, 0, 7), aligned=False)
    yield case(kind, "scores-mask-gaps", mask="random", mask_layout=gaps, **few)
    yield case(f"{kind}-causal", "scores-mask", mask="random", **odd)
    yield case(f"{kind}-causal", "scores-mask-prefix", mask="random", prefix=(170,), **few)
    yield case(kind, "scores-mask-bias", mask="random", bias=own, **few)
    for mask in ("random", "rows"):
        yield case(kind, f"scores-mask-{mask}-softcap", mask=mask, softcap=2.0, **few)
    yield case(kind, "scores-mask-bias-f32", mask="rows", bias=DType.float32, **few)
    yield case(kind, "scores-mask-mod", mask="random", mods="documents", **few)
    yield case(kind, "scores-mask-window", mask="random", **_WINDOW, **few)
    yield case(kind, "scores-mask-nan-in-v", mask="keys", injected=_HIDDEN, **few)
    together = {"softcap": 2.0, "alibi": _SLOPES, "bias": own, "mask": "random"}
    yield case(kind, "scores-options", **together, **few)
    far = {**few, "num_heads": 2, "kv_heads": 1, "batch": 2, "S_q": 300, "S_k": 5003}
    for mask in ("random", "keys"):
        yield case(kind, f"scores-mask-{mask}-far", mask=mask, **far)
