"""Attention cases about visibility (windows, prefixes, masks) and score modifiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.samples.attention_case import AttentionCase, case
from kernelseam.samples.common import INF, NAN, NAN_EXEMPTIONS, SHORT, InjectedValue
from kernelseam.samples.mods import MODS
from kernelseam.samples.operand_layout import OperandLayout

F32 = DType.float32
SLOPES = (0.5, 0.0625)
NO_F64 = frozenset({"shared"})
EVERY_OPTION: dict[str, Any] = {
    "window": (50, 9),
    "prefix": (0, 12),
    "softcap": 8.0,
    "alibi": (0.5, 0.25, 0.125, 0.0625),
    "alibi_batch": True,
    "bias_layout": OperandLayout(broadcast="h"),
    "mask": "random",
    "sinks": (0.0, 1.0, 2.0, -3.0),
    "num_heads": 4,
    "S_q": 33,
}
"""All that change scores; a bias needs its dtype, too."""


def mods() -> Iterator[AttentionCase]:
    """Scores and masks that users write."""
    for name in MODS:
        yield case("f32-64", f"mod-{name}", mods=name, S_q=70, S_k=90, batch=2, kv_heads=1)
    grouped: dict[str, object] = {"S_q": 5, "num_heads": 8, "kv_heads": 1}
    more: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("buckets", "lengths", {"kv_lengths": (90, 33)}),
        ("documents", "packed", {"q_sequences": (70, 12), "k_sequences": (90, 40)}),
        ("buckets", "paged", {"kv_lengths": (90, 33), "page_size": 16}),
        ("buckets", "decoding", {"S_q": 1, "S_k": 300, "kv_lengths": (300, 77)}),
        ("recent", "decoding", {"S_q": 2, "S_k": 2000, "kv_lengths": (2000, 77)}),
        ("heads_apart", "grouped", grouped),
        ("sink_window", "sinks", {"sinks": (0.5, -1.0)}),
        ("sink_window", "options", {"softcap": 2.0, "alibi": SLOPES, "window": (60, 3)}),
        ("documents", "short", {"S_q": 3, "S_k": 17}),
        ("documents", "blocks", {"num_heads": 4, "kv_heads": 2, "blocks": (16, 32)}),
        ("heads_apart", "blocks-grouped", {**grouped, "blocks": (2, 16)}),
        ("tree", "blocks-paged", {"kv_lengths": (90, 33), "page_size": 16, "blocks": (64, 8)}),
        ("prefix", "blocks-decoding", {"S_q": 1, "S_k": 300, "blocks": (1, 32)}),
    )
    for mod, name, fields in more:
        given = {"S_q": 70, "S_k": 90, "kv_lengths": None, **fields}
        yield case("bf16-128", f"mod-{mod}-{name}", mods=mod, **given)


def windows() -> Iterator[AttentionCase]:
    """Sliding windows, and keys before a prefix, which are always visible."""
    for window, name, S_q, S_k in (
        ((16, 0), "16-0", 130, 130),
        ((0, 0), "0-0", 65, 70),
        ((None, 5), "any-5", 65, 40),
        ((3, 0), "3-0-masked-rows", 100, 33),
        ((33, 12), "33-12", 33, 300),
    ):
        yield case("f16-64", f"window-{name}", window=window, S_q=S_q, S_k=S_k, batch=1)
    yield case("f16-64-causal", "window-33-any", window=(33, None), S_q=70, S_k=300, batch=1)
    yield case(
        "bf16-128", "window-100-0-gqa", window=(100, 0), S_q=40, S_k=300, batch=1, num_heads=4
    )
    yield case("f32-64", "window-20-20", window=(20, 20), S_q=70, S_k=70, batch=1)
    # Visible to the first rows alone; later rows share the tile of keys.
    early = {
        "k": InjectedValue("k", NAN, (0, 0, 3, 3)),
        "v": InjectedValue("v", INF, (0, 1, 40, None)),
    }
    for name, injection in early.items():
        yield case(
            "f16-64",
            f"window-nan-in-hidden-{name}",
            window=(8, 0),
            S_q=129,
            S_k=129,
            batch=1,
            injected=(injection,),
            exempt=NAN_EXEMPTIONS if name == "v" else (),
        )
    yield case("f16-64-causal", "prefix", prefix=(5, 41), S_q=70, S_k=70)
    yield case("f16-64-causal", "prefix-none-and-all", prefix=(-3, 1000), S_q=40, S_k=70)
    yield case("f16-64-causal", "prefix-short-of-queries", prefix=(2, 33), S_q=70, S_k=33)
    yield case("f16-64", "prefix-window", window=(8, 0), prefix=(0, 90), S_q=129, S_k=129)
    yield case("f16-64", "prefix-negative", window=(8, 0), prefix=(-3, -(2**31)), S_q=70, S_k=70)
    yield case("f16-64", "prefix-window-early", window=(20, 3), prefix=(7, 1), S_q=70, S_k=129)
    yield case(
        "f16-64-causal",
        "prefix-nan-in-hidden-v",
        prefix=(20,),
        S_q=70,
        S_k=70,
        batch=1,
        injected=(InjectedValue("v", NAN, (0, 0, 33, None)),),
        exempt=NAN_EXEMPTIONS,
    )


def masks() -> Iterator[AttentionCase]:
    yield case("f16-64", "mask", mask="random")
    yield case(
        "f16-64",
        "mask-odd-transposed",
        mask="random",
        mask_layout=OperandLayout("bhcr", (3, 1, 0), False, 5),
    )
    yield case("f16-64", "mask-rows", mask="rows", mask_layout=OperandLayout(broadcast="bh"))
    yield case("f16-64", "mask-all", mask="all", mask_layout=OperandLayout(broadcast="bhrc"))
    yield case("bf16-128-causal", "mask-gqa", mask="random", num_heads=4, S_q=5, S_k=70)
    mask = {
        "mask": "keys",
        "mask_layout": OperandLayout(broadcast="bhr"),
        "S_q": 33,
        "S_k": 40,
        "batch": 1,
    }
    hidden = dict.fromkeys("kv", (0, 1, 30, None))
    for name, index in hidden.items():
        lost = {
            "injected": (InjectedValue(name, NAN, index),),
            "exempt": NAN_EXEMPTIONS if name == "v" else (),
        }
        yield case("f16-64", f"mask-keys-nan-in-{name}", **mask, **lost)


def biases() -> Iterator[AttentionCase]:
    """Softcap, ALiBi, bias and sinks."""
    for kind in ("f16-64", "f32-64"):
        yield case(kind, "softcap-5", softcap=5.0, batch=1)
        # infinite scores are capped to ±5
        infinite = (InjectedValue("q", INF, (0, 1, 7, 5)), InjectedValue("k", -INF, (0, 0, 40, 9)))
        yield case(kind, "softcap-5-infinite", softcap=5.0, batch=1, injected=infinite)
    yield case("f16-64", "softcap-30-extreme", softcap=30.0, data="extreme", batch=1)
    yield case("f16-64", "softcap-huge", softcap=1e6, batch=1)
    yield case("f16-64", "softcap-tiny", softcap=1e-3, scale=-0.3, batch=1)
    yield case("f16-64", "alibi", alibi=SLOPES)
    # blocks of keys that all rows of a tile see, behind the diagonal
    ahead = {"alibi": SLOPES, "prefix": (300, 5), "S_q": 400, "S_k": 400}
    yield case("bf16-128-causal", "alibi-prefix", **ahead)
    yield case(
        "f16-64", "alibi-batch-negative", alibi=(0.25, -0.125), alibi_batch=True, S_q=70, S_k=40
    )
    yield case(
        "f16-64-causal",
        "alibi-gqa",
        alibi=(0.5, 0.25, 0.125, 0.0625),
        num_heads=4,
        S_q=7,
        S_k=250,
        batch=1,
    )
    f16 = SHORT["f16"]
    for name, operand_layout in (
        ("", OperandLayout()),
        ("-by-key", OperandLayout(broadcast="bhr")),
        ("-by-query", OperandLayout(broadcast="bc")),
        ("-odd-transposed", OperandLayout("bhcr", (3, 1, 0), False, 1)),
    ):
        yield case("f16-64", f"bias{name}", bias=f16, bias_layout=operand_layout)
    yield case("f32-64", "bias", bias=F32, S_q=33, S_k=70)
    yield case("f16-64-causal", "bias-f32-gqa", bias=F32, num_heads=4, S_q=33, S_k=70)
    for kind in ("holes", "voids", "low"):
        yield case("f16-64", f"bias-f32-{kind}", bias=F32, bias_data=kind)
    # Times log2(e) it overflows: a row of only these still has a mean, but its LSE is exact to its
    # own magnitude only.
    yield case("f16-64", "bias-f32-lowest", bias=F32, bias_data="lowest", lse=False)
    lost = (InjectedValue("bias", NAN, (0, 1, 5, 7)), InjectedValue("bias", INF, (1, 0, 64, 128)))
    yield case("f16-64", "bias-nan", bias=f16, injected=lost)
    yield case("f16-64", "sinks", sinks=(0.5, -1.0))
    yield case("f16-64", "sinks-huge-and-none", sinks=(1e4, -INF), batch=1)
    # Weights that are subnormal in float32, or underflow.
    yield case(
        "f32-64",
        "sinks-far-above",
        sinks=(86.0, 88.0, 95.0, 103.0),
        num_heads=4,
        S_q=5,
        S_k=7,
        batch=1,
    )
    yield case("f16-64", "sinks-low", sinks=(-1e4, -30.0), data="falling", scale=1.0, batch=1)
    yield case("f16-64-causal", "sinks-masked-rows", sinks=(2.0, -INF), S_q=70, S_k=33, batch=1)
    yield case("f16-64", "sinks-no-keys", sinks=(2.0, -INF), S_k=0)
    yield case(
        "f16-64-causal", "sinks-gqa", sinks=(1.0, 2.0, 3.0, -4.0), num_heads=4, S_q=3, S_k=70
    )


def together() -> Iterator[AttentionCase]:
    """Every option at once."""
    for kind, bias, more in (
        ("f16-64", F32, {}),
        ("bf16-128", SHORT["bf16"], {"dtype_out": F32}),
        ("f64-32", SHORT["f64"], {"may_refuse": NO_F64}),
    ):
        yield case(
            kind,
            "everything",
            bias=bias,
            S_k=100,
            **EVERY_OPTION,
            **more,
        )
