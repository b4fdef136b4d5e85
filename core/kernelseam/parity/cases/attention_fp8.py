"""Attention cases with keys and values of 8 bits: scales of a tensor, heads, entries and blocks;
few queries and many; every view. And with queries of 8 bits, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import E4M3, DType
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import (
    NAN,
    NAN_EXEMPTIONS,
    ODD,
    SHORT_8_BITS,
    TOKENS,
    InjectedValue,
)

_ARCHS = frozenset({"shared"})
"""An arch converts one of the two, or none."""
_PACKED: dict[str, object] = {
    "q_sequences": (33, 1, 0, 40),
    "k_sequences": (33, 70, 0, 129),
    "batch": 4,
    "S_q": 40,
    "margin": 3,
    **dict.fromkeys(("q", "k", "v", "out"), TOKENS),
}
_DECODED: dict[str, object] = {
    "kv_lengths": (1, 16, 17, 0, 100),
    "batch": 5,
    "S_k": 200,
    "page_size": 16,
    "k": TOKENS,
    "v": TOKENS,
}
_BLOCKS: dict[str, object] = {"scales": "blocks", "scale_block": 16}


def stored() -> Iterator[AttentionCase]:
    """Each case with either of the two dtypes."""
    for result in _cases():
        for dtype in E4M3:
            yield replace(
                result,
                name=result.name.replace("8-bit", SHORT_8_BITS[dtype]),
                dtype_kv=dtype,
                may_refuse=_ARCHS,
            )


def stored_queries() -> Iterator[AttentionCase]:
    """The same of cases in which q is of 8 bits, too."""
    for result in _cases_of_queries():
        for dtype in E4M3:
            yield replace(
                result,
                name=result.name.replace("8-bit", SHORT_8_BITS[dtype] + "-q"),
                dtype_q=dtype,
                dtype_kv=dtype,
                may_refuse=_ARCHS,
            )


def scaled_rows() -> Iterator[AttentionCase]:
    """Latent keys whose rows have their scales, as FlashMLA's."""
    rows = {
        "num_heads": 16,
        "kv_heads": 1,
        "latent": True,
        "row_scale_block": 128,
        "dtype_kv": DType.float8_e4m3fn,
        "may_refuse": _ARCHS,
        **dict.fromkeys(("k", "v"), TOKENS),
    }
    pages = {**rows, "S_q": 1, "page_size": 64}
    yield case("bf16-576/512-causal", "scaled-rows", **rows, S_q=2, S_k=130)
    lengths = {"S_k": 700, "batch": 5, "kv_lengths": (1, 64, 700, 0, 129)}
    yield case("bf16-576/512", "scaled-rows-pages-64", **pages, **lengths)
    many = {**pages, **lengths, "num_heads": 128, "S_q": 2}
    yield case("bf16-576/512-causal", "scaled-rows-128-heads", **many)
    split = {**pages, "page_size": 48, "S_k": 3000, "batch": 1, "kv_lengths": (2990,)}
    yield case("bf16-576/512-causal", "scaled-rows-split", **split)
    chunks = {**pages, "S_q": 70, "S_k": 130, "batch": 4, "page_size": 16, "num_heads": 20}
    chunks |= {"q": TOKENS, "out": TOKENS, "q_sequences": (70, 1, 0, 9)}
    yield case("bf16-576/512-causal", "scaled-rows-chunks", **chunks, kv_lengths=(130, 33, 5, 9))
    packed = {n: x for n, x in chunks.items() if n != "page_size"}
    packed |= {"k_sequences": (130, 33, 5, 9), "margin": 2}
    yield case("bf16-576/512", "scaled-rows-sequences", **packed)
    # The last query alone sees this key, which is a value, too; and one whose scale is no number.
    hidden = {**rows, "S_q": 90, "S_k": 100, "batch": 1, "exempt": NAN_EXEMPTIONS}
    nan = (InjectedValue("k", NAN, (0, 0, 99, 3)),)
    # The highest byte of a scale, and a byte with its sign bit set before it.
    scale = tuple(InjectedValue("k", x, (0, 0, 99, 514 + n)) for n, x in enumerate((-1.0, NAN)))
    for what, injected in (("nan", nan), ("nan-scale", scale)):
        yield case("bf16-576/512-causal", f"scaled-rows-hidden-{what}", **hidden, injected=injected)
    few = {**hidden, "S_q": 2, "num_heads": 8}
    yield case("bf16-576/512-causal", "scaled-rows-few-hidden-nan", **few, injected=nan)
    yield case("bf16-576/512-causal", "scaled-rows-few-hidden-nan-scale", **few, injected=scale)
    yield case("bf16-576/512", "scaled-rows-128-heads-one-query", **{**many, "S_q": 1})


def _cases_of_queries() -> Iterator[AttentionCase]:
    for kind in ("f16-64", "bf16-128-causal", "bf16-256", "f16-96-causal", "bf16-192/128"):
        yield case(kind, "8-bit")
    yield case("bf16-64-causal", "8-bit-gqa", num_heads=6, scales="tensor")
    yield case("bf16-128", "8-bit-gqa-heads", num_heads=8, S_q=33, scales="heads")
    yield case("f16-250/40", "8-bit-odd", **dict.fromkeys(("q", "k", "v"), ODD), scales="entries")
    yield case("bf16-128", "8-bit-1-query", S_q=1, num_heads=8, scales="entries")
    yield case("bf16-64", "8-bit-float32", scales="entries", dtype_out=DType.float32)
    yield case("f16-64", "8-bit-negative-scale", scale=-0.2, scales="entries", S_q=40)
    more = {"softcap": 3.0, "window": (40, 9), "sinks": (0.5, -1.0), "alibi": (0.01, 0.3)}
    yield case("bf16-128-causal", "8-bit-changed", **more, scales="entries")
    for kind in ("f16-64", "bf16-256"):  # one term of a score that is far above the others
        yield case(kind, "8-bit-climbing", data="climbing", S_q=40)
    for cap in (5.0, 0.5):
        yield case("bf16-128", f"8-bit-softcap-{cap:g}", softcap=cap, scales="entries")
    yield case("f16-64-causal", "8-bit-softcap-extreme", softcap=30.0, data="extreme")
    lengths = {"kv_lengths": (40, 129, 0, 65), "batch": 4, "S_k": 200, "scales": "entries"}
    for kind in ("bf16-64", "f16-128-causal", "bf16-256"):
        yield case(kind, "8-bit-lengths", **lengths, S_q=33)
    hidden = (InjectedValue("v", NAN, (1, 0, 130, 3)), InjectedValue("k", NAN, (0, 1, 40, 0)))
    yield case(
        "f16-64",
        "8-bit-lengths-softcap",
        **lengths,
        softcap=3.0,
        sinks=(0.5, -1.0),
        injected=hidden,
    )
    yield case("bf16-64", "8-bit-bias-mask", bias=DType.bfloat16, mask="random", scales="heads")
    yield case("bf16-64", "8-bit-nan", injected=(InjectedValue("q", NAN, (0, 1, 7, 3)),))
    yield case(
        "f16-64-causal",
        "8-bit-hidden-nan",
        injected=(InjectedValue("v", NAN, (0, 0, 120, 3)), InjectedValue("k", NAN, (1, 1, 90, 0))),
    )
    yield case(
        "bf16-64",
        "8-bit-nan-scale",
        scales="entries",
        injected=(InjectedValue("q_scales", NAN, (0, 1)),),
    )
    yield case("bf16-128-causal", "8-bit-blocks", **_BLOCKS, q_scale_block=32)
    yield case("f16-64", "8-bit-blocks-gqa", **_BLOCKS, q_scale_block=5, num_heads=6, S_q=20)
    yield case("bf16-64", "8-bit-query-blocks", scales="heads", q_scale_block=16)
    yield case("bf16-64", "8-bit-key-blocks", **_BLOCKS, S_q=40)
    yield case("f16-64-causal", "8-bit-blocks-softcap", **_BLOCKS, q_scale_block=1, softcap=3.0)
    yield case("bf16-128-causal", "8-bit-sequences", **_PACKED, scales="entries")
    more = {"scales": "blocks", "scale_block": 32, "q_scale_block": 8}
    yield case("f16-64", "8-bit-sequences-blocks", **_PACKED, **more)
    yield case("bf16-128-causal", "8-bit-pages", **_DECODED, S_q=4, num_heads=8, scales="entries")
    more = {"scales": "blocks", "scale_block": 5, "q_scale_block": 3}
    yield case("f16-64", "8-bit-pages-blocks", **_DECODED, **more, S_q=20)
    split = {"S_q": 17, "S_k": 3000, "batch": 1, "num_heads": 4, "kv_heads": 1}
    yield case("bf16-128", "8-bit-split", **split, scales="heads")


def _cases() -> Iterator[AttentionCase]:
    few = {"S_q": 1, "num_heads": 8}
    for kind in ("f16-64", "bf16-128"):
        yield case(kind, "8-bit")
        yield case(kind, "8-bit-1-query-gqa", **few, scales="tensor")
    for dims in ("16", "40", "80", "96", "128", "192/128", "256"):
        yield case(f"f16-{dims}-causal", "8-bit-heads", scales="heads", S_q=3)
    yield case("f16-250/40", "8-bit-odd", k=ODD, v=ODD, scales="entries")
    yield case("bf16-576/512-causal", "8-bit-mqa", S_q=5, S_k=70, num_heads=4, kv_heads=1)
    yield case("f16-64", "8-bit-negative-scale", scale=-0.2, scales="entries", S_q=2)
    yield case("f16-64", "8-bit-nan", S_q=3, injected=(InjectedValue("v", NAN, (0, 0, 70, 3)),))
    yield case(
        "f16-64-causal",
        "8-bit-hidden-nan",
        injected=(InjectedValue("v", NAN, (0, 0, 120, 3)), InjectedValue("k", NAN, (1, 1, 90, 0))),
    )
    yield case(
        "f16-64",
        "8-bit-nan-scale",
        **few,
        scales="entries",
        injected=(InjectedValue("v_scales", NAN, (0, 1)), InjectedValue("k_scales", NAN, (1, 0))),
    )
    for kind in ("f16-64", "bf16-128-causal"):
        yield case(kind, "8-bit-blocks", **_BLOCKS, S_q=40)
        yield case(kind, "8-bit-blocks-1-query-gqa", **_BLOCKS, **few)
    yield case("f16-64-causal", "8-bit-keys", scales="blocks", scale_block=1, S_q=20)
    yield case("f16-64", "8-bit-blocks-softcap", **_BLOCKS, softcap=3.0, S_q=5, mask="random")
    yield case(
        "f16-64-causal",
        "8-bit-blocks-hidden-nan",
        **_BLOCKS,
        injected=(
            InjectedValue("v_scales", NAN, (0, 0, 7)),
            InjectedValue("v", NAN, (1, 0, 100, 3)),
        ),
    )
    yield case("f16-64", "8-bit-pages", **few, **_DECODED, scales="heads")
    yield case("bf16-128-causal", "8-bit-pages", **{**few, "S_q": 4}, **_DECODED, scales="entries")
    yield case("f16-128", "8-bit-pages-blocks", **few, **_DECODED, scales="blocks", scale_block=16)
    yield case("bf16-64", "8-bit-pages-keys", **few, **_DECODED, scales="blocks", scale_block=1)
    yield case("f16-64", "8-bit-pages-uneven", **few, **_DECODED, scales="blocks", scale_block=5)
    shared = {**few, "num_heads": 16, "kv_heads": 1, "latent": True, **_DECODED}
    yield case("bf16-576/512", "8-bit-latent-pages", **shared, scales="tensor")
    keys = {"scales": "blocks", "scale_block": 1}
    yield case("bf16-576/512-causal", "8-bit-latent-pages-keys", **{**shared, "S_q": 2}, **keys)
    yield case("f16-64-causal", "8-bit-sequences", **_PACKED, scales="entries")
    yield case("bf16-64", "8-bit-sequences-blocks", **_PACKED, scales="blocks", scale_block=32)
    split = {"S_q": 1, "S_k": 3000, "batch": 1, "num_heads": 4, "kv_heads": 1}
    yield case("f16-64", "8-bit-split", **split, scales="heads")
    yield case("bf16-128", "8-bit-split-blocks", **split, scales="blocks", scale_block=64)
