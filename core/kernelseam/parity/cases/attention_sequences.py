"""Attention cases with sequences of different lengths (kv_lengths, packed, paged), and with pointer
lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import DType
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import INF, NAN, ODD, SHORT, TOKENS, InjectedValue
from kernelseam.samples.operand_layout import OperandLayout

DECODED = (1, 16, 17, 0, 100)
"""Key counts of entries with one query or a few."""


def lengths() -> Iterator[AttentionCase]:
    """Key counts in device memory; keys beyond them are NaN."""
    for kind in ("f16-64", "f16-64-causal"):
        yield case(kind, "lengths", kv_lengths=(40, 129, 0, 65), batch=4, S_q=33)
    yield case("f16-64-causal", "lengths-short-of-queries", kv_lengths=(1, 20), S_q=70, S_k=64)
    yield case("f16-64", "lengths-0", kv_lengths=(0, 0))
    yield case(
        "f16-64",
        "lengths-nan-in-v",
        kv_lengths=(40, 70),
        S_q=20,
        S_k=70,
        injected=(InjectedValue("v", -INF, (0, 1, 39, 5)),),
    )


def _packed(
    kind: str, what: str, q: tuple[int, ...] | None, k: tuple[int, ...] | None, **fields: object
) -> AttentionCase:
    packed_case = case(kind, what, q_sequences=q, k_sequences=k, batch=len(q or k or ()), **fields)
    if q is not None:
        packed_case = replace(packed_case, S_q=max(q), q=TOKENS, out=TOKENS)
    if k is not None:
        packed_case = replace(packed_case, S_k=max(k), k=TOKENS, v=TOKENS)
    return packed_case


def packed() -> Iterator[AttentionCase]:
    """Packed (varlen) rows."""
    mixed, others = (1, 64, 0, 65, 3), (7, 64, 5, 0, 130)
    for kind in ("f16-64", "f16-64-causal", "bf16-128-causal"):
        yield _packed(kind, "sequences", mixed, others)
        yield _packed(kind, "sequences-margin", (33, 7), (33, 7), margin=5)
    # Rows of heads that are no whole panels, and sequences that end within 16 of them.
    for kind in ("f16-72", "bf16-160-causal", "bf16-512-causal"):
        yield _packed(kind, "sequences", mixed, others)
    yield _packed("f32-64-causal", "sequences", (40, 0, 3), (40, 2, 7), lse=False)
    yield _packed(
        "f64-32-causal",
        "sequences-gqa",
        (40, 0, 3),
        (40, 2, 7),
        num_heads=4,
        margin=3,
        lse_gap=3,
        may_refuse=frozenset({"shared"}),
    )
    yield _packed("f16-33/7-causal", "sequences", mixed, others, margin=2, num_heads=6)
    yield _packed("f16-64", "sequences-0", (0, 0, 0), (0, 5, 0))
    yield _packed("f16-64-causal", "sequences-gqa", (3, 1, 2, 33), (40, 40, 2, 33), num_heads=8)
    yield _packed("f16-64", "sequences-gqa-6-2", (3, 22, 2, 43), (40, 40, 2, 33), num_heads=6)
    yield replace(
        _packed("f16-64-causal", "sequences-head-major", (20, 33), (20, 40), margin=1, lse_gap=3),
        q=OperandLayout(),
        k=OperandLayout(gaps=(0, 8, 0)),
        v=ODD,
        out=OperandLayout(),
    )
    yield _packed(
        "f16-64-causal", "sequences-of-q", (1, 33, 20), None, kv_lengths=(0, 70, 33), S_k=70
    )
    yield _packed("f16-64", "sequences-of-k", None, (40, 0, 33), S_q=20)
    yield _packed(
        "f16-64-causal",
        "sequences-everything",
        (1, 33, 40),
        (40, 33, 70),
        window=(20, 0),
        prefix=(0, 3, 50),
        softcap=9.0,
        alibi=(0.5, 0.25, 0.125, 0.0625),
        bias=SHORT["f16"],
        mask="random",
        sinks=(0.0, 1.0, 2.0, -3.0),
        num_heads=4,
    )
    lost = (InjectedValue("k", NAN, (0, 0, 32, 1)), InjectedValue("v", INF, (1, 1, 0, 2)))
    yield _packed("f16-64", "sequences-nan", (20, 20), (33, 33), injected=lost)


def _paged(kind: str, what: str, size: int, kv: tuple[int, ...], **fields: object) -> AttentionCase:
    fields = {"k": TOKENS, "v": TOKENS, "S_k": max(*kv, 1), "batch": len(kv), **fields}
    return case(kind, f"pages-{size}{what}", page_size=size, kv_lengths=kv, **fields)


def paged() -> Iterator[AttentionCase]:
    """Keys in shuffled pages."""
    for size in (1, 16, 48, 256):
        yield _paged("f16-64", "", size, DECODED, S_q=1, S_k=200)
    yield _paged("f16-64", "-full", 1, (40, 33), S_q=5)
    yield _paged("f16-64-causal", "", 16, (70, 33, 0, 5), S_q=33)
    yield _paged("bf16-128-causal", "-gqa", 48, (100, 7), S_q=3, num_heads=8)
    yield _paged("bf16-128-causal", "-gqa-10-2", 16, (100, 7), S_q=26, num_heads=10)
    yield _paged("bf16-128-causal", "-gqa", 5, (300, 7, 0, 129), S_q=40, num_heads=8)
    yield _paged("f32-64-causal", "", 16, (40, 7), S_q=20)
    yield _paged("f16-64", "-0", 16, (0, 0), S_q=3)
    yield _paged(
        "f16-64-causal",
        "-head-major",
        16,
        (70, 33),
        S_q=5,
        k=OperandLayout(gaps=(64, 8, 0)),
        v=OperandLayout(),
    )
    yield _paged("f16-64", "-odd", 16, (40, 33), S_q=5, k=ODD, v=ODD)
    yield replace(
        _paged(
            "f16-64-causal",
            "-sequences",
            16,
            (33, 70, 0, 129),
            q_sequences=(33, 1, 0, 40),
            S_q=40,
            num_heads=4,
            margin=2,
        ),
        q=TOKENS,
        out=TOKENS,
    )
    yield _paged(
        "f16-64",
        "-nan-in-v",
        16,
        (40, 20),
        S_q=5,
        injected=(InjectedValue("v", NAN, (0, 0, 39, 4)),),
    )
    yield _paged(
        "f16-64-causal", "-window-sinks", 48, (129, 60), S_q=7, window=(30, None), sinks=(1.0, -1.0)
    )


def prefix_groups() -> Iterator[AttentionCase]:
    """Entries whose first pages are the same, read once."""
    one = {"S_q": 1, "num_heads": 8, "shared_pages": (0, 3, 4), "prefix_groups": 1}
    three, tokens = (100, 70, 90), {"q": TOKENS, "out": TOKENS}
    for kind in ("bf16-128-causal", "f16-64", "f32-64-causal"):
        yield _paged(kind, "-prefix-group", 16, three, **one)
    yield _paged("f16-64/40-causal", "-prefix-group", 5, three, **one | {"kv_heads": 1})
    for most in (1, 2, 3):
        yield _paged(
            "f16-64-causal",
            f"-prefix-groups-{most}",
            16,
            (33, 48, 20, 50, 65, 40, 90),
            S_q=1,
            shared_pages=(0, 1, 0, 0, 2, 1, 0),
            prefix_groups=most,
        )
    yield _paged("f16-64-causal", "-prefix-none", 16, (33, 0, 20), S_q=1, prefix_groups=2)
    seen = {"S_q": 3, "shared_pages": (0, 2, 1), "prefix_groups": 2, **tokens}
    yield _paged("f16-64-causal", "-prefix-queries", 16, (50, 34, 18), num_heads=4, **seen)
    yield _paged("bf16-128", "-prefix-queries", 16, (50, 34, 18), lse=False, **seen)
    yield _paged(
        "f16-64-causal",
        "-prefix-sinks-softcap",
        16,
        (70, 33, 40),
        sinks=(1.0, -1.0),
        softcap=5.0,
        **seen,
    )
    yield _paged(
        "f16-64-causal",
        "-prefix-sequences",
        16,
        (70, 33, 5, 129, 140),
        q_sequences=(33, 1, 0, 20, 7),
        S_q=33,
        num_heads=4,
        margin=2,
        shared_pages=(0, 2, 0, 0, 6),
        prefix_groups=2,
        **tokens,
    )
    e4m3 = {
        "dtype_kv": DType.float8_e4m3fn,
        "shared_pages": (0, 3, 2),
        "prefix_groups": 1,
        "S_q": 1,
    }
    yield _paged("bf16-64-causal", "-prefix-e4m3", 16, three, **e4m3)
    yield _paged(
        "bf16-64-causal", "-prefix-e4m3-blocks", 16, three, **e4m3, scales="blocks", scale_block=1
    )


def pointers() -> Iterator[AttentionCase]:
    """Every head in its own memory."""
    for kind, view in (
        ("f16-64", "host"),
        ("f16-64-causal", "device"),
        ("bf16-128", "device"),
        ("f32-64", "host"),
    ):
        yield case(kind, f"{view}-pointers", view=view, scattered=True, S_q=33)
    lists = {"view": "device", "scattered": True}
    yield case("f16-64", "host-pointers-evenly", view="host")
    yield case("f16-64-causal", "pointers-gqa", **lists, num_heads=8, S_q=3)
    yield case(
        "f16-64", "pointers-odd", **lists, **dict.fromkeys(("q", "k", "v", "out"), ODD), S_q=33
    )
    yield case(
        "f16-64",
        "pointers-gaps",
        **lists,
        **dict.fromkeys(("q", "k", "v", "out"), OperandLayout(gaps=(0, 0, 8))),
    )
    yield case("f16-64", "pointers-lengths", **lists, kv_lengths=(5, 70), S_k=70)
    yield case(
        "f16-64", "pointers-split", **lists, S_q=1, S_k=1500, batch=1, num_heads=4, kv_heads=1
    )
    yield case("f16-64", "pointers-to-f32", **lists, S_q=20, dtype_out=SHORT["f32"])
    yield case("f16-64", "pointers-no-keys", **lists, S_k=0)
    yield case(
        "f16-64-causal",
        "pointers-everything",
        **lists,
        num_heads=4,
        S_q=33,
        S_k=70,
        softcap=5.0,
        prefix=(3, 20),
        alibi=(0.5, 0.25, 0.125, 0.0625),
        bias=SHORT["f16"],
        mask="random",
        sinks=(1.0, 2.0, 0.0, -1.0),
    )
