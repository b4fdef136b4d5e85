"""The attention forward's rows of the parity matrix: every case on random data, and once more on
the ramp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import DType
from kernelseam.parity.cases.attention_decode import few_queries, latent, options
from kernelseam.parity.cases.attention_fp8 import scaled_rows, stored, stored_queries
from kernelseam.parity.cases.attention_guards import guards
from kernelseam.parity.cases.attention_precision import precisions
from kernelseam.parity.cases.attention_scores import biases, masks, mods, together, windows
from kernelseam.parity.cases.attention_sequences import (
    lengths,
    packed,
    paged,
    pointers,
    prefix_groups,
)
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import (
    DECODE,
    INF,
    NAN,
    NAN_EXEMPTIONS,
    ODD,
    PREFIX_GROUPS,
    TOKENS,
    UNFUSED,
    InjectedValue,
)
from kernelseam.samples.operand_layout import OperandLayout

MAIN = ("f16-64", "f16-64-causal")


def attention_cases() -> list[AttentionCase]:
    groups = {
        "dtypes and shapes": _shapes,
        "strides and layouts": _layouts,
        "scores": _scores,
        "values that are not finite": _non_finite,
        "scores that outgrow a kept reference": guards,
        "windows and prefixes": windows,
        "scores and masks of users": mods,
        "masks": masks,
        "biases, caps and sinks": biases,
        "everything together": together,
        "lengths": lengths,
        "packed sequences": packed,
        "pages": paged,
        "lists of addresses": pointers,
        "few queries and split keys": few_queries,
        "keys and values of 8 bits": stored,
        "queries, keys and values of 8 bits": stored_queries,
        "latent": latent,
        "latent, with scales in rows of 8 bits": scaled_rows,
        "prefix groups": prefix_groups,
        "wide heads, results in float32, batch invariance": options,
        "precision of float32": precisions,
    }
    plain = [replace(c, group=group) for group, cases in groups.items() for c in cases()]
    plain = [
        replace(
            c,
            may_refuse=c.may_refuse
            | {DECODE}
            # an arch may have no TF32, or convert other numbers of 8 bits
            | ({UNFUSED} if _beyond_unfused(c) or c.precision else set())
            | ({PREFIX_GROUPS} if c.prefix_groups is None or c.dtype_kv else set())
            | ({"shared"} if c.prefix_groups is not None else set()),
        )
        for c in plain
    ]
    cases_and_ramps = [x for c in plain for x in (c, replace(c, name=c.name + "-ramp", ramp=True))]
    assert len({c.name for c in cases_and_ramps}) == len(cases_and_ramps)
    return cases_and_ramps


def _beyond_unfused(c: AttentionCase) -> bool:
    """Whether it is not two strided batched GEMMs and a softmax of known options."""
    return (
        c.view != "strided"
        or bool(c.mods)
        or c.dtype is DType.float64
        or c.dtype_kv is not None
        or c.q_sequences is not None
        or c.keys is not None
    )


def _shapes() -> Iterator[AttentionCase]:
    for dims in ("16", "32", "40", "64", "80", "96", "128", "192/128", "256", "32/80"):
        yield case(f"f16-{dims}")
    for kind in (
        "f16-128-causal",
        "f16-192/128-causal",
        "bf16-128-causal",
        "bf16-192/128-causal",
        "bf16-256-causal",
    ):
        yield case(kind, S_q=129, batch=1)
    for kind in ("bf16-64", "bf16-128", "f32-64", "f32-40"):
        yield case(kind)
    # Head dims between the widths of tiles, of keys and values apart.
    for kind in ("f16-72", "bf16-64/128", "f16-136/184", "bf16-160-causal", "bf16-512-causal"):
        yield case(kind, S_q=129, S_k=200, batch=1)
    yield case("bf16-224/200", S_q=70, S_k=130, batch=1)
    yield case("f16-320/264", S_q=70, S_k=130, batch=1, num_heads=4, kv_heads=2)
    yield case("f32-64-causal", S_q=70, S_k=70, batch=1)
    # Rows that end within 16 bytes and are followed by NaN there; and rows without gaps between
    # them.
    for kind in ("f16-33/7", "f32-5/19-causal"):
        yield case(kind, S_q=33, S_k=70)
    tight = dict.fromkeys(("q", "k", "v", "out"), OperandLayout(aligned=False))
    yield case("bf16-1-causal", "tight", **tight, S_q=33, S_k=70)
    for S_q, S_k in (
        (1, 1),
        (1, 129),
        (7, 63),
        (63, 64),
        (64, 65),
        (129, 7),
        (200, 300),
        (1, 2049),
    ):
        yield case("f16-64", f"{S_q}x{S_k}", S_q=S_q, S_k=S_k, batch=1)
    for S_q, S_k in ((1, 1), (1, 65), (7, 129), (64, 64), (65, 65), (130, 130), (250, 255)):
        yield case("f16-64-causal", f"{S_q}x{S_k}", S_q=S_q, S_k=S_k, batch=1)
    yield case("bf16-128-causal", "250x250", S_q=250, S_k=250, batch=1)
    yield case("f64-32-causal", may_refuse=frozenset({"shared"}))
    for kind in ("f16-64-causal", "bf16-128-causal", "f32-64-causal"):
        yield case(kind, "masked-rows", S_q=100, S_k=33, batch=1)
    yield case("f16-64-causal", "masked-rows-but-one", S_q=129, S_k=1)
    for kind in MAIN:
        yield case(kind, "no-keys", S_k=0)
        yield case(kind, "no-queries", S_q=0)
    yield case("f16-64", "no-batch", batch=0)
    yield case("f16-64", "no-lse", lse=False)
    yield case("f16-64-causal", "no-lse", lse=False, S_q=129, batch=1)
    yield case("f32-64", "no-lse", lse=False)
    yield case("f16-64", "gqa-6-2", num_heads=6)
    yield case("f16-64-causal", "gqa-8-2", num_heads=8, S_q=20, S_k=20)
    yield case("f16-64", "mqa", num_heads=5, kv_heads=1)
    yield case("bf16-128-causal", "gqa-14-2", num_heads=14, S_q=20, S_k=300)
    yield case("bf16-128", "gqa-4-2", num_heads=4, S_q=7)
    yield case("f16-16", "66000-heads", S_q=1, S_k=3, batch=33000, num_heads=2, sample=2000)


def _layouts() -> Iterator[AttentionCase]:
    tokens = {"q": TOKENS, "k": TOKENS, "v": TOKENS, "out": TOKENS}
    gaps = OperandLayout(gaps=(48, 24, 8))
    for kind in MAIN:
        yield case(kind, "bshd", **tokens, S_q=70, S_k=70, batch=1)
        yield case(kind, "packed", packed=True, out=TOKENS, S_q=67, S_k=67, batch=2, num_heads=4)
    yield case("f16-64", "bshd-to-bhsd", **{**tokens, "out": OperandLayout()})
    for kind in ("f16-64", "f16-72", "bf16-160-causal"):
        yield case(kind, "gaps", q=gaps, k=gaps, v=gaps, out=gaps, lse_gap=3)
    yield case(
        "f16-64",
        "gaps-bshd",
        **dict.fromkeys(("q", "k", "v", "out"), OperandLayout("brh", (64, 16, 8))),
        lse_gap=1,
    )
    yield case(
        "f16-64",
        "same-kv-batch",
        k=OperandLayout(broadcast="b"),
        v=OperandLayout(broadcast="b"),
        batch=3,
    )
    yield case(
        "f16-64", "same-kv-heads", k=OperandLayout(broadcast="h"), v=OperandLayout(broadcast="bh")
    )
    yield case("f16-64", "same-k-rows", k=OperandLayout(broadcast="r"))
    yield case("f16-64", "odd", q=ODD, k=ODD, v=ODD, out=ODD)
    yield case(
        "f16-64",
        "odd-rows",
        **dict.fromkeys(("q", "k", "v", "out"), OperandLayout("brh", (0, 0, 1), aligned=False)),
    )
    yield case("f16-40-causal", "odd", q=ODD, k=ODD, v=ODD, out=ODD, S_q=33, S_k=40)


def _scores() -> Iterator[AttentionCase]:
    for kind in ("f16-64", "f16-64-causal", "f32-64", "bf16-128"):
        yield case(kind, "extreme", data="extreme", batch=1)
    for kind in ("f16-64", "f32-64"):
        yield case(kind, "falling", data="falling", scale=1.0, batch=1)
        yield case(kind, "climbing", data="climbing", batch=1)
        yield case(kind, "minus-inf-holes", data="holes", batch=1)
    yield case("f16-64-causal", "climbing", data="climbing", S_q=129, batch=1)
    yield case("f16-64", "minus-inf-all", data="voids", batch=1)
    yield case("f16-64", "scale-0", scale=0.0)
    yield case("f16-64-causal", "scale-0", scale=0.0)
    yield case("f16-64", "scale-negative", scale=-0.3)
    yield case("f16-64-causal", "scale-negative", scale=-0.3)


def _non_finite() -> Iterator[AttentionCase]:
    for what, operand, value in (
        ("nan-in-q", "q", NAN),
        ("nan-in-k", "k", NAN),
        ("nan-in-v", "v", NAN),
        ("inf-in-v", "v", INF),
        ("minus-inf-in-v", "v", -INF),
        ("inf-in-k", "k", INF),
    ):
        yield case("f16-64", what, injected=(InjectedValue(operand, value, (0, 1, 5, 2)),), batch=1)
    # Under a causal mask these keys are hidden from most rows and visible to the last ones: keys
    # 100 and 101 are hidden from some rows of a tile and visible to others, whatever its size.
    hidden = {
        "k": InjectedValue("k", NAN, (0, 0, 100, 3)),
        "v": InjectedValue("v", NAN, (0, 1, 100, None)),
    }
    last = {
        "k": InjectedValue("k", INF, (0, 1, 128, 0)),
        "v": InjectedValue("v", -INF, (0, 0, 101, 7)),
    }
    for kind in ("f16-64-causal", "f32-64-causal", "bf16-128-causal"):
        yield case(
            kind, "nan-in-hidden-k", S_q=129, S_k=129, batch=1, injected=(hidden["k"], last["k"])
        )
        yield case(
            kind,
            "nan-in-hidden-v",
            S_q=129,
            S_k=129,
            batch=1,
            injected=(hidden["v"], last["v"]),
            exempt=NAN_EXEMPTIONS,
        )
    everything = (InjectedValue("k", NAN, (None,) * 4), InjectedValue("v", NAN, (None,) * 4))
    yield case(
        "f16-64-causal",
        "masked-rows-nan",
        S_q=66,
        S_k=2,
        batch=1,
        injected=everything,
        exempt=NAN_EXEMPTIONS,
    )
