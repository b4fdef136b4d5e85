"""Parity cases for kernels whose blocks stay: so many tiles that each block of the largest GPUs
meets several.

In the matrix's own cases such a block meets one tile: its rings of barriers hardly wrap, what it
knows of a tile is not overwritten by another's, no counter hands anything out. Here they do, with
few and with many blocks of keys a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_bwd_case import case as gradients
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.attention_case import case as attention
from kernelseam.samples.case import Case
from kernelseam.samples.common import NAN, TOKENS, InjectedValue
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.gemm_case import case as gemm
from kernelseam.samples.grouped_case import GroupedCase
from kernelseam.samples.grouped_case import case as grouped
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase
from kernelseam.samples.grouped_pointers_case import case as listed
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.projection_case import ProjectionCase
from kernelseam.samples.projection_case import case as projection
from score_cases import scores

HEADS = 132
"""The multiprocessors of an H200; the other sizes are in these."""
ROWS = 600
"""Of the result, held against the oracle; whether all were written is asked of every element."""


def _heads(batch: int, heads: int = HEADS) -> dict[str, int]:
    return {"batch": batch, "num_heads": heads, "kv_heads": heads}


def _attention() -> Iterator[AttentionCase]:
    # About six tiles a block; three blocks of keys each, then a single one, then many.
    for kind in ("f16-64", "bf16-128"):
        yield attention(kind, "many-tiles", **_heads(6))
        yield attention(kind, "many-tiles-one-block", S_q=70, S_k=50, **_heads(10))
        yield attention(kind, "many-tiles-long", S_q=33, S_k=600, **_heads(2))
    for dims in ("96", "192/128", "256"):
        yield attention(f"f16-{dims}", "many-tiles", **_heads(3))
    yield attention("bf16-256", "many-tiles-one-ring", S_q=100, S_k=570, **_heads(2))
    # Tiles by a counter: of two lengths, of which one sees nothing, with values that only some rows
    # see.
    yield attention("f16-64-causal", "many-tiles", S_q=300, S_k=310, **_heads(3))
    yield attention("bf16-128-causal", "many-tiles", S_q=200, S_k=200, **_heads(4))
    yield attention("bf16-256-causal", "many-tiles", S_q=140, S_k=150, **_heads(2))
    yield attention("f16-64-causal", "many-tiles-masked", S_q=300, S_k=33, **_heads(3))
    hidden = (
        InjectedValue("v", NAN, (None, None, 100, 3)),
        InjectedValue("v", NAN, (0, None, 40, None)),
    )
    for kind in ("f16-64-causal", "bf16-128-causal", "bf16-256-causal"):
        yield attention(kind, "many-tiles-nan-in-v", S_q=129, S_k=129, injected=hidden, **_heads(3))
    sinks = tuple(0.1 * h for h in range(HEADS))
    both = {"softcap": 2.0, "sinks": sinks}
    yield attention(
        "f16-64-causal",
        "many-tiles-nan-in-v-capped",
        S_q=129,
        S_k=129,
        injected=hidden,
        **both,
        **_heads(3),
    )
    # Keys in parts, whose blocks are a cluster; the last one's NaN is seen by some of the queries.
    cluster = {"batch": 1, "num_heads": 32, "kv_heads": 8, "S_q": 40, "S_k": 3000}
    yield attention("bf16-128-causal", "few-queries", **cluster)
    yield attention(
        "bf16-128-causal",
        "few-queries-nan-in-v",
        injected=(InjectedValue("v", NAN, (None, None, 2970, 3)),),
        **cluster,
    )
    yield attention("f16-64", "few-queries", **{**cluster, "kv_heads": 32}, sinks=sinks[:32])
    # Two blocks share a multiprocessor.
    yield attention("bf16-128-causal", "many-short-tiles", S_q=64, S_k=64, **_heads(3))
    yield attention("f16-64-causal", "many-short-tiles", S_q=70, S_k=70, **_heads(2))
    grouped = {"batch": 7, "num_heads": HEADS, "kv_heads": HEADS // 4}
    yield attention("bf16-128-causal", "many-tiles-gqa", S_q=130, S_k=130, **grouped)
    for kind in ("bf16-128-causal", "f16-256-causal"):  # 76 rows: a warp has 12
        yield attention(kind, "many-tiles-gqa-few", S_q=19, S_k=130, **grouped)
    yield attention("f16-64", "many-tiles-window", S_q=140, S_k=300, window=(33, 12), **_heads(3))
    yield attention("f16-64", "many-tiles-softcap", softcap=5.0, **_heads(4))
    lengths = tuple(37 * i % 170 for i in range(6))
    yield attention(
        "bf16-128",
        "many-tiles-lengths",
        S_k=170,
        kv_lengths=lengths,
        window=(100, 0),
        softcap=20.0,
        sinks=sinks,
        **_heads(6),
    )
    q, k = (tuple(a * i % b for i in range(90)) for a, b in ((37, 151), (53, 203)))
    operand_layouts = dict.fromkeys(("q", "k", "v", "out"), TOKENS)
    packed = {
        "q_sequences": q,
        "k_sequences": k,
        "batch": len(q),
        "S_q": max(q),
        "S_k": max(k),
        **operand_layouts,
    }
    yield attention("f16-64-causal", "many-tiles-sequences", num_heads=8, **packed)
    yield attention("bf16-128", "many-tiles-sequences", num_heads=4, **packed)
    # In pages: prefills, chunks and single queries; heads of a group share tiles of few queries.
    for kind, size in (
        ("bf16-128-causal", 16),
        ("bf16-128-causal", 8),
        ("f16-64-causal", 48),
        ("f16-96", 16),
        ("bf16-256-causal", 64),
    ):
        yield attention(kind, f"many-tiles-pages-{size}", page_size=size, **_new_and_old(8, 2))
    speculated = tuple(i % 8 for i in range(90))
    yield attention(
        "bf16-128-causal", "many-tiles-pages-gqa", page_size=16, **_new_and_old(16, 4, speculated)
    )
    # Five heads of a group: twelve queries are 60 of a consumer's rows.
    yield attention("bf16-128-causal", "few-queries-five-heads", **{**cluster, "num_heads": 40})
    yield attention(
        "bf16-128-causal", "many-tiles-pages-five-heads", page_size=16, **_new_and_old(10, 2)
    )
    # A value that some queries see, in a page with values that none does.
    yield attention(
        "bf16-128-causal",
        "many-tiles-pages-nan-in-v",
        page_size=16,
        injected=(InjectedValue("v", NAN, (None, None, 30, 3)),),
        **_new_and_old(8, 2),
    )
    # Of e4m3: sums are moved after 2048 keys; tiles of one block of keys, hidden NaN, sequences.
    stored = dict.fromkeys(("dtype_q", "dtype_kv"), DType.float8_e4m3fn)
    for kind in ("f16-64", "bf16-128", "bf16-256"):
        yield attention(kind, "many-tiles-e4m3", **stored, **_heads(3))
        shared = {"batch": 2, "num_heads": HEADS, "kv_heads": HEADS // 33, "S_q": 33, "S_k": 2500}
        yield attention(kind, "many-tiles-e4m3-long", **stored, **shared)
        for name, by in (("rises", 9.0), ("rises-far", 78.0)):
            far = {"steps": ((0, by), (200, 0.0)), **shared}
            yield attention(kind, f"many-tiles-e4m3-{name}", **far, **stored)
        # Of a warp's 16 rows one alone: the first of a thread's two in one warp, the second in the
        # next.
        alone = {"steps": ((0, 9.0), (200, 0.0)), "steps_every": 24, **shared}
        yield attention(kind, "many-tiles-e4m3-rises-every-24", **alone, **stored)
        few = {"S_q": 70, "S_k": 50, "scales": "entries"}
        yield attention(kind, "many-tiles-e4m3-one-block", **few, **stored, **_heads(4))
        both = {"S_q": 129, "S_k": 129, "injected": hidden}
        yield attention(f"{kind}-causal", "many-tiles-e4m3-nan-in-v", **both, **stored, **_heads(2))
        yield attention(
            f"{kind}-causal", "many-tiles-e4m3-sequences", num_heads=4, **stored, **packed
        )
        yield attention(
            kind,
            "many-tiles-e4m3-lengths",
            S_k=170,
            kv_lengths=lengths,
            softcap=20.0,
            **stored,
            **_heads(6),
        )
        yield attention(
            f"{kind}-causal",
            "many-tiles-e4m3-pages",
            page_size=16,
            **stored,
            **_new_and_old(16, 4, speculated),
        )


def _new_and_old(heads: int, kv_heads: int, queries: tuple[int, ...] = ()) -> dict[str, Any]:
    """Packed queries of 90 sequences, whose keys are in pages."""
    q = queries or tuple(37 * i % 151 for i in range(90))
    k = tuple(53 * i % 403 for i in range(90))
    return {
        "q_sequences": q,
        "kv_lengths": k,
        "batch": len(q),
        "num_heads": heads,
        "kv_heads": kv_heads,
        "S_q": max(q),
        "S_k": max(k),
        **dict.fromkeys(("q", "k", "v", "out"), TOKENS),
    }


def _decoding() -> Iterator[AttentionCase]:
    # Work that is cut by the lengths in memory: entries of no key, of one, and of several pieces.
    lengths = tuple(397 * i % 1801 for i in range(40))
    pages = {**dict.fromkeys("kv", TOKENS), "S_k": max(lengths), "kv_lengths": lengths}
    few = {**pages, "batch": len(lengths), "kv_heads": 2}
    yield attention("f16-128-causal", "many-entries", num_heads=8, page_size=16, S_q=3, **few)
    yield attention("bf16-64", "many-entries", num_heads=4, page_size=1, S_q=1, **few)
    one = {**few, "kv_heads": 1, "num_heads": 16, "latent": True}
    for queries, size in ((1, 64), (2, 5)):
        what = f"many-entries-latent-{queries}"
        yield attention("bf16-576/512-causal", what, S_q=queries, page_size=size, **one)
    # Chunks of prompts among them, with more queries than keys here and there.
    chunks = tuple(211 * i % 29 for i in range(40))
    packed = {**one, "q_sequences": chunks, "S_q": max(chunks), "q": TOKENS, "out": TOKENS}
    yield attention("bf16-576/512-causal", "many-entries-latent-chunks", page_size=16, **packed)


def _projections() -> Iterator[ProjectionCase]:
    # Tokens of three entries, which end within tiles; heads of 128, some of them rotated.
    shape: dict[str, Any] = {
        "batch": 3,
        "S": 520,
        "hidden": 520,
        "head_dim": 128,
        "num_heads": 12,
        "kv_heads": 4,
    }
    yield projection("qkv_projection", "f16", "many-tiles", **shape, bias=DType.float16)
    rotated: dict[str, Any] = {"rotary": "halves", "positions": True, **shape}
    yield projection("qkv_projection", "bf16", "many-tiles-turned", **rotated)
    yield projection("qkv_projection", "f16", "many-tiles-pages", page_size=16, **rotated)
    added: dict[str, Any] = {"residual": DType.bfloat16, **shape, "hidden": 2056}
    yield projection("output_projection", "bf16", "many-tiles-added", **added)
    yield projection("qkv_projection_bwd", "bf16", "many-tiles", **shape, bias=DType.float32)
    yield projection("output_projection_bwd", "f16", "many-tiles", **{**shape, "hidden": 1032})


def _gradients() -> Iterator[BackwardCase]:
    # Three tiles a block and more, with one and with several steps, in order and in any; no larger,
    # as the oracle's gradients are whole.
    for kind in ("f16-64", "bf16-96", "bf16-128", "bf16-192/128", "bf16-256"):
        for name, free in (("", {}), ("-any-order", {"deterministic": False})):
            yield gradients(kind, f"many-tiles{name}", S_q=40, S_k=260, **_heads(1), **free)
            both = {"S_q": 140, "S_k": 140, **_heads(1), **free}
            yield gradients(f"{kind}-causal", f"many-tiles{name}", **both)
        yield gradients(f"{kind}-causal", "many-tiles-few-keys", S_q=200, S_k=33, **_heads(2))
        grouped = {"batch": 7, "num_heads": HEADS, "kv_heads": HEADS // 4}
        yield gradients(f"{kind}-causal", "many-tiles-gqa", S_q=9, S_k=200, **grouped)
        yield gradients(kind, "many-tiles-window", window=(33, 12), S_q=70, S_k=140, **_heads(2))
        if kind in ("f16-64", "bf16-128"):  # by element; entries share a bias
            both = {"S_q": 140, "S_k": 160, **_heads(2, HEADS // 2)}
            bias = DType.float32 if kind == "f16-64" else DType.bfloat16
            shared: dict[str, Any] = {"bias": bias, "bias_layout": OperandLayout(broadcast="b")}
            if kind == "bf16-128":  # the first entry has fewer keys
                shared["kv_lengths"] = 30, 160
            yield gradients(kind, "many-tiles-bias", bias_gradient=True, **shared, **both)
            yield gradients(f"{kind}-causal", "many-tiles-mask", mask="random", **both)
            more: dict[str, Any] = {"bias": bias, "bias_gradient": True, "prefix": (90, 30)}
            yield gradients(f"{kind}-causal", "many-tiles-prefix-bias", **both, **more)
            both = {"S_q": 600, "S_k": 600, **_heads(1)}
            yield gradients(kind, "many-tiles-documents", mods="documents", **both)
            yield gradients(f"{kind}-causal", "many-tiles-prefix", prefix=(250,), **both)
        q, k = (tuple(a * i % b for i in range(60)) for a, b in ((37, 71), (53, 203)))
        walks = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), TOKENS)
        packed = {
            "q_sequences": q,
            "k_sequences": k,
            "batch": len(q),
            "S_q": max(q),
            "S_k": max(k),
            **walks,
        }
        yield gradients(f"{kind}-causal", "many-tiles-sequences", num_heads=6, **packed)
        if kind == "bf16-128":
            slopes = tuple(2.0**-h for h in range(6))
            yield gradients(kind, "many-tiles-sequences-alibi", num_heads=6, alibi=slopes, **packed)
            yield gradients(
                kind, "many-tiles-sequences-gaps", mods="blocks_of_documents", num_heads=6, **packed
            )
            shared = {"bias": DType.float32, "bias_layout": OperandLayout(broadcast="b")}
            yield gradients(
                kind,
                "many-tiles-sequences-bias",
                bias_gradient=True,
                num_heads=6,
                **shared,
                **packed,
            )


def _grouped() -> Iterator[GroupedCase]:
    # Groups of none, few and many tiles, more of them than a block meets.
    sizes = tuple(97 * i % 401 for i in range(120))
    yield grouped("bf16-m-nn", "many-tiles", sizes=sizes, N=392, K=328, rest=70)
    yield grouped("f16-m-nt", "many-tiles", sizes=sizes, N=392, K=328)
    # Few tiles of a long sum: each is cut into parts.
    cut: dict[str, object] = {"sizes": (300, 3, 500, 0, 300), "rest": 1000, "N": 512, "K": 8200}
    yield grouped("bf16-m-nn", "many-tiles-cut", **cut)
    # Groups that begin within 16 bytes of C, share them, and end within panels.
    for kind, more in (
        ("bf16-n-nn", {"rest": 70}),
        ("bf16-n-nt", {}),
        ("f16-n-tn", {"dtype_c": DType.float32}),
        ("bf16-n-tt", {"beta": -0.5, "sizes": sizes[:60]}),
    ):
        yield grouped(kind, "many-tiles", **{"sizes": sizes, "M": 392, "K": 328, **more})
    gated = {"epilogue": "swiglu", "preactivation": True}
    yield grouped("bf16-m-nt", "many-tiles-gated", sizes=sizes, N=784, K=328, rest=70, **gated)
    in_turns: dict[str, object] = {"epilogue": "swiglu", "N": 384, "K": 328, "rest": 70}
    yield grouped("bf16-m-nt", "many-tiles-gated-in-turns", sizes=sizes, **in_turns)
    yield grouped("bf16-m-nn", "many-tiles-gated", sizes=sizes, N=768, K=328, **gated)
    yield grouped("bf16-m-nt", "many-tiles-beta", sizes=sizes[:60], N=392, K=72, beta=-0.5)
    few = tuple(31 * i % 131 for i in range(70))
    yield grouped("bf16-k-tn", "many-tiles", sizes=few, M=392, N=264, rest=30)
    yield grouped("bf16-k-tn", "many-tiles-integers", sizes=few, M=392, N=264, data="integers")


def _lists() -> Iterator[GroupedPointersCase]:
    # Products of no rows, no sum, one tile and many, with more slices than a ring or fewer.
    many = ((97 * i % 401, 8 + 72 * i % 640, 8 + 56 * i % 600) for i in range(120))
    sizes = ((0, 24, 8), (70, 40, 0), *many)
    for kind in ("bf16-nn", "bf16-nt", "f16-tn"):
        yield listed(kind, "many-tiles", sizes=sizes)
        yield listed(kind, "many-tiles-device", sizes=sizes, view="device")
    odd = tuple((m, n + 3, k) for m, n, k in sizes)
    yield listed("bf16-nn", "many-tiles-odd-columns", sizes=odd)
    yield listed("bf16-nt", "many-tiles-beta", sizes=sizes, alpha=2.5, beta=-0.5)
    yield listed("f16-nt", "many-tiles-to-f32", sizes=sizes, dtype_c=DType.float32)
    yield listed("bf16-nn", "many-tiles-integers", sizes=sizes, data="integers")


def _gemm() -> Iterator[GemmCase]:
    # Tiles that end within the matrix, and sums of more blocks than a ring has stages, the last of
    # them short.
    shape = {"M": 520, "N": 392, "K": 584, "batch": 3, "num_heads": 11}
    for kind in ("f16-nt", "bf16-nn", "f16-tn", "bf16-tt"):
        yield gemm(kind, "many-tiles", **shape)
    yield gemm("bf16-nt", "many-tiles-integers", data="integers", **shape)
    yield gemm("f16-nt", "many-tiles-beta", alpha=2.5, beta=-0.5, **shape)
    yield gemm("f16-nt", "many-tiles-to-f32", dtype_c=DType.float32, **shape)
    yield gemm("bf16-nt", "many-tiles-added", bias=DType.bfloat16, residual=DType.bfloat16, **shape)
    yield gemm("bf16-nt", "many-tiles-one-block", M=264, N=136, K=40, batch=10, num_heads=66)
    yield gemm(
        "f16-nt",
        "many-tiles-pointers",
        M=264,
        N=136,
        K=72,
        batch=6,
        num_heads=66,
        view="host",
        scattered=True,
    )
    one = {"batch": 1, "num_heads": 1, "data": "integers"}
    yield gemm("bf16-nt", "many-tiles-one-matrix", M=2056, N=4104, K=520, **one)  # by clusters
    yield gemm("f16-nn", "many-tiles-few-rows", M=72, N=20488, K=520, **one)
    # Few rows, which alone are loaded, of sums that a cluster shares; few tiles, cut into parts.
    both: dict[str, Any] = {"bias": DType.bfloat16, "residual": DType.bfloat16}
    yield gemm("bf16-nt", "few-tokens", M=12, N=1000, K=4104, beta=0.5, **both, **one)
    yield gemm("f16-nn", "few-tokens-of-two-warps", M=20, N=2000, K=4104, **one)
    few: dict[str, Any] = {"M": 600, "N": 1000, "K": 8200}
    yield gemm("bf16-nt", "many-tiles-cut", alpha=0.5, **few, **one)
    yield gemm("f16-nn", "many-tiles-cut-added", beta=0.5, bias=DType.float16, **few, **one)
    silu: dict[str, Any] = {**one, "epilogue": "silu", "data": "normal"}  # of whole numbers none
    yield gemm("bf16-nt", "many-tiles-cut-silu", **both, **few, **silu)
    # A single row of tiles, where a block may have the ends of two.
    row: dict[str, Any] = {"N": 10104, "K": 4104, **silu}
    yield gemm("bf16-nt", "few-tokens-cut", M=12, reductions=("row_squares",), **row)
    yield gemm("bf16-nt", "some-tokens-cut", M=40, **both, **row)
    # One wave of tiles by clusters that share A, in the order of tiles.py; long sums of few.
    bias = {"bias": DType.bfloat16, **silu}
    waves = ((300, 2008), (380, 2008), (560, 2008), (560, 3000), (2300, 1000))
    for M, N in waves:
        yield gemm("bf16-nt", f"one-wave-{M}x{N}", M=M, N=N, K=2048, **bias)
    yield gemm("bf16-nt", "one-wave-integers", M=560, N=2008, K=2048, **one)
    yield gemm("bf16-nt", "long-sums", M=300, N=312, K=4104, **bias)
    for precision in ("tf32", "tf32x3"):
        ways: dict[str, object] = {"precision": precision, **shape}
        for kind in ("f32-nn", "f32-nt", "f32-tt"):
            yield gemm(kind, f"many-tiles-{precision}", **ways)
        for kind in ("f32-nn", "f32-nt"):
            yield gemm(kind, f"many-tiles-{precision}-integers", data="integers", **ways)
        added = {"bias": DType.float32, "residual": DType.float32}
        yield gemm("f32-nn", f"many-tiles-{precision}-added", beta=0.5, **added, **ways)
        yield gemm("f32-nt", f"many-tiles-{precision}-added", **added, **ways)
        yield gemm("f32-nn", f"many-tiles-{precision}-one-block", **{**ways, "K": 24})
        for kind in ("f32-nn", "f32-nt"):
            yield gemm(
                kind,
                f"many-tiles-{precision}-pointers",
                M=264,
                N=136,
                K=72,
                batch=6,
                num_heads=66,
                view="host",
                scattered=True,
                precision=precision,
            )
    # Of e4m3: scales of blocks come beside the slices; source tiles, which have none, between them.
    blocks = {"scales": "blocks", "scale_block": (1, 128, 128), "K": 592}
    yield _stored("many-tiles-blocks", **{**shape, **blocks})
    yield _stored(
        "many-tiles-blocks-added", **{**shape, **blocks}, beta=0.5, residual=DType.bfloat16
    )
    yield _stored("many-tiles-blocks-one-matrix", M=2056, N=4104, **one, **blocks)
    # Epilogues: consumers have tiles of their own, between whose slices source tiles come.
    bf16, apart = DType.bfloat16, {**shape, "batch": 1, "num_heads": 33, "N": 400}
    written = {"bias": bf16, "preactivation": True}
    yield gemm("bf16-nt", "many-tiles-silu", epilogue="silu", **written, **apart)
    sources = {"alpha": 0.5, "beta": 0.5, "bias": DType.float16, "residual": DType.float16}
    yield gemm("f16-nn", "many-tiles-in-turn", epilogue="in_turn", **sources, **apart)
    yield gemm("bf16-nt", "many-tiles-gate", epilogue="gated_options", **written, **apart)
    yield gemm("f16-nn", "many-tiles-swiglu", epilogue="swiglu", preactivation=True, **apart)
    neighbours = {"epilogue": "interleaved_options", "preactivation": True}
    yield gemm("f16-nt", "many-tiles-interleaved", **neighbours, **apart)
    yield gemm(
        "bf16-tn", "many-tiles-powers-to-f32", epilogue="powers", dtype_c=DType.float32, **apart
    )
    whole = {"M": 2056, "N": 4112, "K": 520, "batch": 1, "num_heads": 1}
    gates = (2056, "swiglu_interleaved"), (2056, "quantized_gate")
    for rows, epilogue in gates:
        to = {"dtype_c": DType.float8_e4m3fn} if epilogue == "quantized_gate" else {}
        yield gemm(
            "bf16-nt", f"{rows}-tokens-{epilogue}", epilogue=epilogue, **{**whole, "M": rows}, **to
        )
    for rows, epilogue in ((2056, "swiglu"), (500, "geglu"), (60, "silu"), (60, "swiglu")):
        yield gemm(
            "bf16-nt",
            f"{rows}-tokens-{epilogue}",
            epilogue=epilogue,
            **{**whole, "M": rows},
            **written,
        )
    # Of few rows or columns: blocks read rows of the other factor once.
    for what, rows, columns in (("one-row", 1, 20488), ("three-columns", 20488, 3)):
        thin = {"M": rows, "N": columns, "K": 1032, "batch": 1, "num_heads": 2}
        yield gemm("bf16-nt", f"many-tiles-{what}", bias=DType.bfloat16, **thin)
        yield gemm("f16-nn", f"many-tiles-{what}", **thin)
    odd = OperandLayout(gaps=(64, 8, 16))
    yield gemm("f16-nt", "many-tiles-gaps", a=odd, b=odd, c=odd, **shape)


def _sums() -> Iterator[GemmCase]:
    """In an epilogue: of all rows, which are held against the oracle."""
    sums = {"reductions": ("row_squares", "column_sums", "amax_squares")}
    shape = {"M": 456, "N": 400, "K": 200, "batch": 1, "num_heads": 20}
    for name, epilogue in (("", "silu"), ("-gate", "gated_options")):
        yield gemm("bf16-nt", f"many-tiles-sums{name}", epilogue=epilogue, **sums, **shape)
    # Of tiles that all run at once, whose launch adds up the parts: of one matrix, and of several.
    for what, batch, heads in (("", 1, 1), ("-batch", 3, 1)):
        few = {"M": 456, "N": 400, "K": 200, "batch": batch, "num_heads": heads}
        yield gemm("bf16-nt", f"sums-at-once{what}", **sums, **few)
    # The last strip of columns ends behind the result, in a part that has none of them.
    sums = {"reductions": ("row_squares", "column_sums", "amax")}
    shape = {"M": 2090, "N": 1560, "K": 200, "batch": 1, "num_heads": 1}
    for name, epilogue in (("", "silu"), ("-gate", "gated_options")):
        what = f"many-tiles-sums-one-matrix{name}"
        yield gemm("bf16-nt", what, epilogue=epilogue, **sums, **shape)


def _stored(what: str, **fields: object) -> GemmCase:
    """Of e4m3, whose rows are whole chunks of 16 bytes."""
    result = gemm("bf16-nt", what, **fields)
    name = result.name.replace("bf16", "e4m3fn")
    return replace(result, name=name, dtype=DType.float8_e4m3fn, dtype_c=DType.bfloat16)


def _all() -> dict[str, Case]:
    cases: list[AttentionCase | GemmCase] = [*_attention(), *scores(), *_decoding(), *_gemm()]
    group = "many tiles a block"
    results: list[Case] = [replace(c, group=group, sample=ROWS) for c in cases]
    results += [replace(c, group=group) for c in _sums()]
    results += [replace(c, group=group) for c in _gradients()]
    results += [replace(c, group=group) for c in _projections()]
    results += [replace(c, group=group) for c in _grouped()]
    results += [replace(c, group=group) for c in _lists()]
    assert len({c.name for c in results}) == len(results)
    return {c.name: c for c in results}


CASES = _all()
