"""The rows of the parity matrix about an attention's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import DType
from kernelseam.parity.cases.attention_precision import precise_gradients
from kernelseam.parity.cases.attention_scores import EVERY_OPTION
from kernelseam.samples.attention_bwd_case import BackwardCase, case
from kernelseam.samples.common import INF, NAN, ODD, SHORT, TOKENS, InjectedValue
from kernelseam.samples.operand_layout import OperandLayout

F16, F32 = SHORT["f16"], DType.float32
EVERY = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
MAIN = ("f16-64", "f16-64-causal")
RAMPED = frozenset(
    {
        *MAIN,
        "f16-128",
        "bf16-128-causal",
        "f32-64",
        "f16-256",
        "f16-64-gqa-6-2",
        "f16-64-causal-33x129",
        "f16-64-window-33-12",
        "f16-64-lengths",
        "f16-64-sequences",
    }
)
"""Cases that run also on the ramp, where the last keys weigh most."""


def attention_bwd_cases() -> list[BackwardCase]:
    groups = {
        "gradients of everything together": _together,
        "gradients: dtypes and shapes": _shapes,
        "gradients: strides and layouts": _layouts,
        "gradients: scores": _scores,
        "gradients of biases and sinks": _operands,
        "gradients: lengths": _lengths,
        "gradients of wide heads": _wide,
        "gradients in any order": _any_order,
        "gradients under scores and masks of users": _mods,
        "gradients: precision of float32": precise_gradients,
    }
    plain = [replace(c, group=group) for group, cases in groups.items() for c in cases()]
    cases_and_ramps = [
        x
        for c in plain
        for x in ((c, _ramped(c)) if c.name.removeprefix("attention-bwd-") in RAMPED else (c,))
    ]
    assert (
        len({c.name for c in cases_and_ramps}) == len(cases_and_ramps) == len(plain) + len(RAMPED)
    )
    return cases_and_ramps


def _ramped(c: BackwardCase) -> BackwardCase:
    return replace(
        c,
        name=c.name + "-ramp",
        forward=replace(c.forward, name=c.forward.name + "-ramp", ramp=True),
    )


def _together() -> Iterator[BackwardCase]:
    for kind, dtype, more in (
        ("f16-64", F32, {}),
        ("bf16-128", SHORT["bf16"], {}),
        ("f64-32", SHORT["f64"], {"may_refuse": frozenset({"shared"})}),
    ):
        yield case(
            kind,
            "everything",
            bias=dtype,
            bias_gradient=True,
            sink_gradient=True,
            **EVERY_OPTION,
            **more,
        )
    yield case(
        "f16-64-causal",
        "sequences-everything",
        q_sequences=(1, 33, 40),
        k_sequences=(40, 33, 70),
        batch=3,
        window=(20, 0),
        prefix=(0, 3, 50),
        softcap=9.0,
        alibi=(0.5, 0.25, 0.125, 0.0625),
        bias=F16,
        mask="random",
        sinks=(0.0, 1.0, 2.0, -3.0),
        num_heads=4,
        bias_gradient=True,
        sink_gradient=True,
        **dict.fromkeys(EVERY, TOKENS),
    )


def _shapes() -> Iterator[BackwardCase]:
    for kind in (
        *MAIN,
        "f16-128",
        "bf16-128-causal",
        "f32-64",
        "f16-80/64",
        "bf16-64/128-causal",
        "f16-72",
        "f16-96",
        "bf16-160-causal",
        "f16-192/128",
        "f16-256",
        "f32-128/40-causal",
    ):
        yield case(kind, S_q=65, S_k=129)
    for kind in ("bf16-192/256-causal", "f32-256/192", "f16-136/184"):
        yield case(kind, S_q=33, S_k=33, batch=1)
    for kind in ("f16-33/7", "f32-5/19-causal"):
        yield case(kind, S_q=33)
    yield case(
        "bf16-1-causal", "tight", **dict.fromkeys(EVERY, OperandLayout(aligned=False)), S_q=33
    )
    yield case("f64-32", may_refuse=frozenset({"shared"}))
    for S_q, S_k in ((1, 1), (1, 129), (129, 7)):
        yield case("f16-64", f"{S_q}x{S_k}", S_q=S_q, S_k=S_k, batch=1)
    for S_q, S_k in ((33, 129), (130, 130), (100, 33)):
        yield case("f16-64-causal", f"{S_q}x{S_k}", S_q=S_q, S_k=S_k, batch=1)
    yield case("f16-64", "no-keys", S_k=0)
    yield case("f16-64", "no-queries", S_q=0)
    yield case("f16-64", "no-batch", batch=0)
    yield case("f16-64", "no-heads-of-queries", num_heads=0, kv_heads=2)
    yield case("f16-64", "gqa-6-2", num_heads=6, S_q=20)
    yield case("f16-64-causal", "mqa-5", num_heads=5, kv_heads=1, S_q=70)
    yield case("bf16-128-causal", "gqa-4-2", num_heads=4, S_q=7)


def _layouts() -> Iterator[BackwardCase]:
    yield case("f16-64-causal", "bshd", **dict.fromkeys(EVERY, TOKENS))
    for kind in ("f16-64", "f16-72", "f16-40-causal", "f16-136/184"):
        gaps = OperandLayout(gaps=(48, 24, 8))
        yield case(kind, "gaps", **dict.fromkeys(EVERY, gaps), lse_gap=3)
    yield case("f16-64", "odd", **dict.fromkeys(EVERY, ODD))
    yield case(
        "f16-40-causal",
        "odd-rows",
        **dict.fromkeys(EVERY, OperandLayout("brh", (0, 0, 1), aligned=False)),
    )
    yield case("f16-64", "packed", packed=True, S_q=67, S_k=67, num_heads=4)
    yield case(
        "f16-64",
        "same-kv-batch",
        k=OperandLayout(broadcast="b"),
        v=OperandLayout(broadcast="bh"),
        dout=OperandLayout(order="brh"),
    )


def _scores() -> Iterator[BackwardCase]:
    for kind in ("f16-64", "f32-64"):
        yield case(kind, "extreme", data="extreme", batch=1)
        yield case(kind, "falling", data="falling", scale=1.0, batch=1)
    yield case("f16-64-causal", "climbing", data="climbing", batch=1)
    yield case("f16-64", "scale-negative", scale=-0.3)
    yield case("f16-64", "scale-0", scale=0.0)
    for window, name, S_q, S_k in (
        ((16, 0), "16-0", 130, 130),
        ((33, 12), "33-12", 33, 200),
        ((3, 0), "3-0", 100, 33),
    ):
        yield case("f16-64", f"window-{name}", window=window, S_q=S_q, S_k=S_k, batch=1)
    yield case("f16-64-causal", "prefix", prefix=(5, 41), S_q=70)
    yield case("f16-64", "prefix-window", window=(8, 0), prefix=(0, 60))
    yield case("f16-64", "prefix-negative", window=(8, 0), prefix=(-3, -(2**31)), S_q=70)
    yield case("f16-64", "mask", mask="random")
    yield case("f16-64", "mask-rows", mask="rows", mask_layout=OperandLayout(broadcast="bh"))
    yield case("f16-64", "mask-all", mask="all", mask_layout=OperandLayout(broadcast="bhrc"))
    yield case("f16-64-causal", "alibi-gqa", alibi=(0.5, 0.25, 0.125, 0.0625), num_heads=4)
    yield case("f16-64", "softcap-5", softcap=5.0)
    yield case("f32-64", "softcap-2-extreme", softcap=2.0, data="extreme", batch=1)
    yield case(
        "f16-64", "nan-in-dout", injected=(InjectedValue("dout", NAN, (0, 1, 5, 2)),), batch=1
    )


def _operands() -> Iterator[BackwardCase]:
    bias = {"bias": F16, "bias_gradient": True}
    for name, axes in (
        ("", ""),
        ("-by-key", "bhr"),
        ("-by-query", "bc"),
        ("-of-heads", "brc"),
        ("-one", "bhrc"),
    ):
        # The gradient of a row's scores sums to 0, except for a sink's share.
        sinks: dict[str, object] = {"sinks": (3.0, 2.0)} if "c" in axes else {}
        yield case(
            "f16-64", f"bias{name}", bias_layout=OperandLayout(broadcast=axes), **bias, **sinks
        )
    yield case(
        "f16-64",
        "bias-odd-transposed",
        bias_layout=OperandLayout("bhcr", (3, 1, 0), False, 1),
        dbias=OperandLayout("bhcr", (0, 1, 5)),
        **bias,
    )
    gaps = OperandLayout(gaps=(8, 4, 4), offset=1)
    yield case("f16-64-causal", "bias-f32-gqa", **{**bias, "bias": F32}, dbias=gaps, num_heads=4)
    yield case(
        "f16-64",
        "bias-f32-holes",
        **{**bias, "bias": F32},
        bias_data="holes",
        bias_layout=OperandLayout(broadcast="h"),
    )
    yield case("f16-64", "bias-f32-voids", **{**bias, "bias": F32}, bias_data="voids")
    yield case(
        "f16-64", "bias-voids", bias_data="voids", bias_layout=OperandLayout(broadcast="h"), **bias
    )
    yield case("f16-64", "bias-alone", bias=F16, bias_layout=OperandLayout(broadcast="h"))
    # Empty sums.
    for what, axis, extent in (
        ("batch", "b", {"batch": 0}),
        ("heads", "h", {"num_heads": 0}),
        ("queries", "r", {"S_q": 0}),
        ("keys", "c", {"S_k": 0}),
    ):
        yield case(
            "f16-64", f"bias-no-{what}", bias_layout=OperandLayout(broadcast=axis), **bias, **extent
        )
    yield case(
        "f16-64", "bias-softcap", softcap=3.0, bias_layout=OperandLayout(broadcast="b"), **bias
    )
    yield case(
        "f32-64-causal",
        "bias-window",
        window=(20, 3),
        bias_layout=OperandLayout(broadcast="b"),
        **{**bias, "bias": F32},
    )
    yield case("f16-64", "sinks", sinks=(0.5, -1.0), sink_gradient=True)
    yield case("f16-64", "sinks-alone", sinks=(0.5, -1.0))
    yield case("f16-64", "sinks-huge-and-none", sinks=(1e4, -INF), sink_gradient=True, batch=1)
    yield case(
        "f16-64-causal", "sinks-masked-rows", sinks=(2.0, -INF), sink_gradient=True, S_q=70, S_k=33
    )


def _lengths() -> Iterator[BackwardCase]:
    for kind in MAIN:
        yield case(kind, "lengths", kv_lengths=(40, 129, 0, 65), batch=4, S_q=33, S_k=129)
    yield case(
        "f16-64-causal",
        "lengths-bias-sinks",
        kv_lengths=(1, 50),
        bias=F16,
        bias_gradient=True,
        sinks=(1.0, -1.0),
        sink_gradient=True,
        bias_layout=OperandLayout(broadcast="b"),
        S_q=20,
    )
    rows = dict.fromkeys(EVERY, TOKENS)
    mixed, others = (1, 64, 0, 65, 3), (7, 64, 5, 0, 130)
    packed = {
        "q_sequences": mixed,
        "k_sequences": others,
        "batch": 5,
        "S_q": 65,
        "S_k": 130,
        **rows,
    }
    for kind in (*MAIN, "bf16-128-causal", "bf16-72-causal", "f16-33/7-causal"):
        yield case(kind, "sequences", **packed)
    yield case("f64-32-causal", "sequences", **packed, may_refuse=frozenset({"shared"}))
    yield case(
        "f16-64",
        "sequences-0",
        **{**packed, "q_sequences": (0, 0), "k_sequences": (0, 5), "batch": 2},
    )
    yield case(
        "f16-64-causal",
        "sequences-margin-gqa",
        q_sequences=(33, 7),
        k_sequences=(33, 20),
        batch=2,
        num_heads=4,
        margin=5,
        S_q=33,
        S_k=33,
        lse_gap=3,
        **rows,
    )
    yield case(
        "f16-64-causal",
        "sequences-of-q",
        q_sequences=(1, 33, 20),
        batch=3,
        S_q=33,
        kv_lengths=(0, 70, 33),
        q=TOKENS,
        out=TOKENS,
        dout=TOKENS,
        dq=TOKENS,
    )
    yield case(
        "f16-64",
        "sequences-of-k",
        k_sequences=(40, 0, 33),
        batch=3,
        S_q=20,
        S_k=40,
        k=TOKENS,
        v=TOKENS,
        dk=TOKENS,
        dv=TOKENS,
    )
    # Beyond a sequence's queries the bias is NaN and its gradient 0, also for an empty sequence,
    # and where the last sequence's bias is NaN.
    bias: dict[str, object] = {
        "q_sequences": (100, 0, 4),
        "kv_lengths": (30, 11, 7),
        "batch": 3,
        "S_q": 100,
        "S_k": 30,
        "bias_gradient": True,
    }
    yield case("f16-64", "sequences-of-q-bias", bias=F16, **bias)
    yield case(
        "f16-64",
        "sequences-of-q-bias-nan",
        bias=F16,
        injected=(InjectedValue("bias", NAN, (2, 0, 3, 3)),),
        **bias,
    )
    yield case("f16-64", "sequences-of-q-bias-any-order", bias=F32, deterministic=False, **bias)
    # No sequence has queries: empty sums.
    nothing = {**bias, "q_sequences": (0, 0, 0), "bias_layout": OperandLayout(broadcast="br")}
    yield case("f16-64", "sequences-0-of-q-bias", bias=F16, **nothing)
    yield case(
        "f16-64", "sequences-0-of-q-bias-any-order", bias=F32, deterministic=False, **nothing
    )


def _wide() -> Iterator[BackwardCase]:
    # What kernels for few head dims take, with the other dims and dtype.
    kind = "bf16-128"
    yield case(kind, "window-33-12", window=(33, 12), S_q=33, S_k=200, batch=1)
    yield case(kind, "softcap-5", softcap=5.0)
    yield case(kind, "sinks", sinks=(0.5, -1.0), sink_gradient=True, S_q=70)
    yield case(kind, "lengths", kv_lengths=(40, 129, 0, 65), batch=4, S_q=33, S_k=129)
    lengths = {"kv_lengths": (40, 129, 0, 65), "batch": 4, "S_q": 70, "S_k": 129}
    sinks = {"sinks": (0.5, -1.0), "sink_gradient": True}
    for kind in ("bf16-96", "bf16-192/128", "bf16-256"):
        yield case(kind, "window-softcap-sinks", window=(33, 12), softcap=5.0, **sinks, **lengths)
    sequences = {"q_sequences": (33, 7, 0, 70), "k_sequences": (33, 20, 5, 140), "batch": 4}
    tokens = dict.fromkeys(EVERY, TOKENS)
    shape = {"S_q": 70, "S_k": 140, "num_heads": 4}
    for kind in ("f16-96-causal", "f16-192/128-causal", "f16-256-causal"):
        yield case(kind, "sequences", **sequences, **shape, **tokens)


def _any_order() -> Iterator[BackwardCase]:
    free: dict[str, object] = {"deterministic": False}
    yield case("f16-64-causal", "any-order", S_q=65, S_k=129, **free)
    yield case("f32-128/40", "any-order", S_q=70, S_k=70, **free)
    yield case("f16-33/7", "any-order", S_q=33, **free)
    yield case("f16-64", "any-order-no-keys", S_k=0, **free)
    yield case(
        "f16-64", "any-order-bias-voids", bias=F32, bias_data="voids", bias_gradient=True, **free
    )
    yield case("f16-64", "any-order-falling", data="falling", scale=1.0, batch=1, **free)
    yield case(
        "bf16-128-causal",
        "any-order-sequences-gqa",
        q_sequences=(33, 7, 0, 40),
        k_sequences=(33, 20, 5, 40),
        batch=4,
        num_heads=4,
        margin=5,
        S_q=40,
        S_k=40,
        lse_gap=3,
        **dict.fromkeys(EVERY, TOKENS),
        **free,
    )
    yield case(
        "f16-80/48",
        "any-order-everything",
        bias=F32,
        bias_gradient=True,
        sink_gradient=True,
        **EVERY_OPTION,
        **free,
    )


def _mods() -> Iterator[BackwardCase]:
    for name in (
        *("documents", "heads_apart", "alibi", "soft_cap", "another_cap", "temperature"),
        *("segments", "never", "scalars", "buckets"),
    ):
        yield case("f32-64", f"mod-{name}", mods=name, S_q=40, S_k=50, num_heads=4)
    yield case("f16-64", "mod-any-order", mods="alibi", S_q=40, S_k=40, deterministic=False)
    blocks = {"mods": "documents", "S_q": 150, "S_k": 150, "blocks": (16, 16)}
    yield case("bf16-64", "mod-blocks", num_heads=4, kv_heads=2, **blocks)
    lengths = {"q_sequences": (33, 7), "k_sequences": (33, 20), "S_q": 33, "S_k": 33}
    yield case("bf16-128", "mod-sequences", mods="relative", **lengths)
    yield case("f16-64-causal", "mod-options", mods="soft_cap", softcap=6.0, sinks=(0.5, -1.0))
