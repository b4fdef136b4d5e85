"""Attention cases with few queries: heads that share a thread block, split-KV; wide heads; float32
results; batch invariance."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.dtypes import DType
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import NAN, NAN_EXEMPTIONS, TOKENS, InjectedValue

F32 = DType.float32


def few_queries() -> Iterator[AttentionCase]:
    """Groups of heads, and thousands of keys."""
    yield case("f16-64", "1-query-gqa-8-2", S_q=1, num_heads=8)
    yield case("f16-64-causal", "3-queries-gqa-8-2", S_q=3, num_heads=8)
    yield case("f16-64-causal", "3-queries-mqa-5", S_q=3, S_k=2, num_heads=5, kv_heads=1)
    yield case(
        "f16-64-causal",
        "20-queries-mqa-6-bshd",
        S_q=20,
        S_k=40,
        num_heads=6,
        kv_heads=1,
        q=TOKENS,
        out=TOKENS,
        lse_gap=5,
    )
    few = {"S_q": 1, "S_k": 5000, "batch": 1, "num_heads": 4, "kv_heads": 1}
    three = {**few, "S_q": 3, "S_k": 1500}
    for kind in ("f16-64", "bf16-128", "f32-64"):
        yield case(kind, "split", **few)
    yield case("f16-64", "split-no-lse", **few, lse=False)
    yield case(
        "f16-64", "split-batches", S_q=3, S_k=1500, batch=2, num_heads=4, kv_heads=2, lse_gap=3
    )
    yield case("f16-64", "split-value-dim-40", **few, value_dim=40, out=TOKENS)
    yield case("f16-64-causal", "split", **{**three, "S_q": 7})
    yield case("f16-64-causal", "split-sinks", **three, sinks=(3.0, -1.0, 1e3, -1e3))
    yield case("f16-64-causal", "split-window", **three, window=(1200, None))
    yield case("f16-64", "split-nan", **three, injected=(InjectedValue("v", NAN, (0, 0, 900, 3)),))
    yield case("f16-64", "split-mask-all", **three, mask="all")
    for n in (0, 513):
        yield case("f16-64", f"split-lengths-{n}", **three, kv_lengths=(n,))
    yield case(
        "f16-64", "split-pages", **three, kv_lengths=(1490,), page_size=16, k=TOKENS, v=TOKENS
    )
    yield case(
        "f16-64-causal",
        "split-sequences",
        **three,
        q_sequences=(3,),
        k_sequences=(1500,),
        margin=2,
        q=TOKENS,
        k=TOKENS,
        v=TOKENS,
        out=TOKENS,
    )


def options() -> Iterator[AttentionCase]:
    """Wide heads, float32 results, batch invariance."""
    wide = {"S_q": 17, "S_k": 70, "batch": 1, "num_heads": 4, "kv_heads": 1}
    for kind in ("f16-192/128-causal", "f16-272/40-causal", "bf16-576/512-causal"):
        yield case(kind, "mqa", **wide)
    yield case("bf16-576/512-causal", "1-query-mqa", **{**wide, "S_q": 1})
    for kind in ("f16-64", "bf16-128-causal"):
        yield case(kind, "to-f32", dtype_out=F32)
    yield case("f16-64-causal", "batch-invariant", batch_invariant=True, S_q=7, num_heads=4)
    yield case(
        "f16-64", "split-to-f32", S_q=1, S_k=1500, batch=1, num_heads=1, kv_heads=1, dtype_out=F32
    )


def latent() -> Iterator[AttentionCase]:
    """Multi-head latent attention: v is the first columns of k, which all heads share."""
    one = {"S_q": 1, "num_heads": 16, "kv_heads": 1, "latent": True}
    pages = {**one, "k": TOKENS, "v": TOKENS, "page_size": 64}
    yield case("f16-64/40-causal", "latent", **one, S_k=70)
    yield case("bf16-576/512-causal", "latent", **{**one, "S_q": 2}, S_k=130)
    yield case("bf16-576/512", "latent-lengths", **one, S_k=200, kv_lengths=(200, 63))
    yield case(
        "bf16-576/512-causal",
        "latent-pages-64",
        **pages,
        S_k=700,
        batch=5,
        kv_lengths=(1, 64, 700, 0, 129),
    )
    yield case(
        "f16-576/512",
        "latent-pages-5",
        **{**pages, "num_heads": 20, "page_size": 5, "lse": False},
        S_k=200,
        kv_lengths=(200, 33),
    )
    yield case(
        "bf16-576/512-causal",
        "latent-pages-1-2-queries",
        **{**pages, "num_heads": 128, "S_q": 2, "page_size": 1},
        S_k=130,
        kv_lengths=(65, 130),
    )
    yield case(
        "bf16-576/512-causal",
        "latent-split",
        **{**pages, "num_heads": 20, "page_size": 48},
        S_k=3000,
        batch=1,
        kv_lengths=(2990,),
        ramp=True,
    )
    # Chunks of prompts beside decoding: rows of several queries in a tile, and of many tiles.
    chunks = {**pages, "S_q": 70, "S_k": 130, "batch": 4, "q": TOKENS, "out": TOKENS}
    chunks |= {"q_sequences": (70, 1, 0, 9), "kv_lengths": (130, 33, 5, 9)}
    yield case("bf16-576/512-causal", "latent-chunks-pages-64", **chunks)
    yield case("f16-576/512-causal", "latent-chunks-pages-16", **{**chunks, "page_size": 16})
    yield case("bf16-576/512", "latent-chunks-no-mask", **chunks)
    many = {**chunks, "num_heads": 128, "page_size": 16, "q_sequences": (20, 1, 0, 9)}
    yield case("bf16-576/512-causal", "latent-chunks-128-heads", **{**many, "S_q": 20})
    packed = {n: x for n, x in chunks.items() if n not in ("kv_lengths", "page_size")}
    packed |= {"k_sequences": (130, 33, 5, 9), "margin": 2, "num_heads": 20}
    yield case("bf16-576/512-causal", "latent-chunks-sequences", **packed)
    square = {**one, "S_q": 90, "S_k": 70, "batch": 1}
    yield case("bf16-576/512-causal", "latent-more-queries-than-keys", **square)
    # The last query alone sees this key, which is a value, too.
    hidden = {"injected": (InjectedValue("k", NAN, (0, 0, 99, 3)),), "exempt": NAN_EXEMPTIONS}
    yield case("bf16-576/512-causal", "latent-nan-in-hidden-k", **{**square, "S_k": 100, **hidden})
    few = {**one, "num_heads": 5, "S_q": 3, "S_k": 100, "batch": 1}
    yield case("bf16-576/512-causal", "latent-few-rows-nan-in-hidden-k", **{**few, **hidden})
