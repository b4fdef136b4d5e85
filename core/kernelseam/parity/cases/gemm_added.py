"""GEMM cases of what is added to a product: a bias and a residual, and other products of a batch or
of heads."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.samples.common import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    NAN,
    ODD,
    SHORT,
    TOKENS,
    InjectedValue,
)
from kernelseam.samples.gemm_case import TALL, GemmCase, both, case
from kernelseam.samples.operand_layout import OperandLayout

ALL = OperandLayout(broadcast="bh")
"""Broadcast over batches and heads."""


def added() -> Iterator[GemmCase]:
    yield case("f16-nt", "bias-residual", **both(F16))
    yield case("f16-nt", "bias-residual-alpha-beta", **both(F16, alpha=2.5, beta=-0.5, M=129, K=64))
    yield case(
        "f16-nt",
        "bias-residual-integers",
        **both(F16, data="integers", alpha=2, beta=-1, N=136, K=129),
    )
    yield case(
        "f16-nt",
        "bias-residual-ragged",
        **both(F16, M=7, N=136, bias_layout=OperandLayout(aligned=False, offset=1)),
    )
    yield case(
        "f16-nt", "bias-residual-group", **both(F16, num_heads=6, b_head_group=2, bias_layout=ALL)
    )
    for what, operand_layout in (
        ("gaps", OperandLayout(gaps=(40, 24, 8))),
        ("token-major", TOKENS),
        ("same-batch", OperandLayout(broadcast="b")),
        ("same-heads", OperandLayout(broadcast="h")),
        ("same-rows", OperandLayout(broadcast="r")),
    ):
        yield case(
            "f16-nt",
            f"bias-residual-{what}",
            **both(F16, bias_layout=operand_layout, residual_layout=operand_layout),
        )
    yield case("f16-nt", "bias-residual-in-place", **both(F16, in_place=True, M=129, N=136))
    yield case(
        "f16-nt",
        "bias-residual-in-place-token-major",
        **both(F16, in_place=True, c=TOKENS, alpha=-1),
    )
    yield case("f16-nt", "bias", bias=F16, bias_layout=ALL)
    yield case("f16-nt", "residual", residual=F16)
    yield case("f16-nt", "bias-residual-to-f32", **both(F32, dtype_c=F32, residual_layout=TOKENS))
    mixed = {"bias": F32, "residual": BF16, "N": 136}
    yield case("bf16-nn", "bias-f32-residual", **mixed)
    yield case(
        "bf16-nn", "bias-f32-residual-rounded", **mixed, data="integers", alpha=201, M=65, K=129
    )
    yield case(
        "f64-tn", "bias-residual", **both(F64, residual_layout=OperandLayout(gaps=(0, 0, 6)))
    )
    large = OperandLayout(broadcast="h")
    for kind in ("f16-nt", "f32-nn"):
        dtype = SHORT[kind[:3]]
        yield case(
            kind,
            "bias-residual-large",
            **both(dtype, M=1100, N=1032, K=70, sample=300, residual_layout=large),
        )
        yield case(kind, "bias-residual-k-0", **both(dtype, K=0, beta=0.5))
        nan = (InjectedValue("A", NAN, (0, None, 1, 2)), InjectedValue("B", INF, (0, None, 2, 1)))
        yield case(kind, "bias-residual-alpha-0-nan-in", **both(dtype, alpha=0, injected=nan))
        non_finite = (
            InjectedValue("bias", NAN, (0, 1, 0, 5)),
            InjectedValue("residual", INF, (1, 2, 64, 71)),
        )
        yield case(kind, "bias-nan-residual-inf", **both(dtype, injected=non_finite))
        yield case(
            kind,
            "bias-residual-beta-0-nan-in-c",
            **both(dtype, injected=(InjectedValue("C", NAN, (None,) * 4),)),
        )
    for kind, dtype, high in (("f16-nt", F16, 65504.0), ("f32-nn", F32, 3.4e38)):
        # Near the largest finite value: alone a valid result, with an equal residual an overflow.
        injected = tuple(
            InjectedValue(name, x, index)
            for x, column in ((high, 5), (-high, 69))
            for name, index in (("bias", (0, 1, 0, column)), ("residual", (0, 1, 33, column)))
        )
        yield case(kind, "bias-residual-overflow", **both(dtype, injected=injected))
    yield case(
        "f32-nn",
        "bias-residual-odd",
        **both(F32, bias_layout=ODD, residual_layout=OperandLayout(offset=1, aligned=False)),
    )
    yield case("f16-nt", "bias-residual-no-rows", **both(F16, M=0))
    yield case("f16-nt", "bias-residual-tall", **both(F16, **TALL))
    listed = both(F16, view="host", scattered=True)
    yield case("f16-nt", "pointers-bias-residual", **listed)
    yield case(
        "f16-nt",
        "pointers-bias-residual-device",
        **{**listed, "view": "device"},
        residual_layout=OperandLayout(gaps=(0, 0, 8)),
    )
    yield case("f16-nt", "pointers-bias-residual-even", **both(F16, view="host", beta=0.5))
    yield case("f16-nt", "pointers-bias-residual-in-place", **listed, in_place=True)
    yield case("f16-nt", "pointers-same-bias", **listed, bias_layout=ALL, K=0)


def sums() -> Iterator[GemmCase]:
    """Sums as in gradients of broadcast operands: a weight for the batch, keys for a group of
    heads."""
    for ops, dtype, to in (
        ("nt", "f16", None),
        ("tn", "f16", F32),
        ("nn", "f32", None),
        ("tn", "bf16", None),
    ):
        kind = f"{dtype}-{ops}"
        yield case(kind, "sum-batch", dtype_c=to, batch=5, num_heads=2, c_batch_group=5)
        yield case(kind, "sum-heads", dtype_c=to, num_heads=6, c_head_group=3)
    kind = "f16-nt"
    yield case(kind, "sum-all", batch=4, num_heads=6, c_batch_group=4, c_head_group=6, M=33, N=40)
    yield case(
        kind,
        "sum-both",
        batch=6,
        num_heads=6,
        c_batch_group=3,
        c_head_group=2,
        M=33,
        N=40,
        a=TOKENS,
        b=TOKENS,
    )
    for group, summed in ((2, 4), (4, 2), (3, 3), (4, 8), (3, 2)):
        fields = {"num_heads": 8 if group % 3 else 6, "b_head_group": group, "c_head_group": summed}
        yield case(kind, f"sum-{summed}-of-b-group-{group}", M=33, N=40, **fields)
    yield case(kind, "sum-integers", data="integers", batch=4, c_batch_group=2, N=136)
    yield case(kind, "sum-alpha-beta", batch=4, c_batch_group=2, alpha=-0.5, beta=1.5)
    yield case(
        kind,
        "sum-alpha-0",
        batch=4,
        c_batch_group=2,
        alpha=0,
        beta=0.5,
        injected=(InjectedValue("A", NAN, (None,) * 4),),
    )
    yield case(kind, "sum-k-0", batch=4, c_batch_group=2, K=0)
    yield case(
        kind,
        "sum-nan-in-a",
        batch=4,
        c_batch_group=2,
        injected=(InjectedValue("A", NAN, (3, 1, 5, 6)),),
    )
    yield case(kind, "sum-same-a", batch=4, c_batch_group=2, a=OperandLayout(broadcast="b"))
    yield case(
        kind, "sum-long", batch=8, num_heads=8, c_batch_group=8, c_head_group=4, M=17, N=24, K=300
    )
    yield case(
        "f32-nn",
        "sum-long-positive",
        batch=64,
        num_heads=2,
        c_batch_group=64,
        M=17,
        N=24,
        K=33,
        data="positive",
    )
    yield case(
        kind, "sum-many", M=8, N=8, K=8, batch=300, num_heads=4, c_batch_group=150, c_head_group=2
    )
    # sums of one matrix
    yield case(kind, "sum-rows", M=1, N=72, K=40, batch=65, num_heads=3, c_batch_group=65)
    together = both(
        F32,
        batch=4,
        c_batch_group=2,
        num_heads=6,
        c_head_group=3,
        bias_layout=ALL,
        residual_layout=TOKENS,
    )
    yield case("f32-nn", "sum-bias-residual", **together)
    yield case("f32-nn", "sum-residual-in-place", **{**together, "in_place": True, "c": TOKENS})
    listed = {**together, "view": "host", "residual_layout": OperandLayout()}
    yield case("f32-nn", "pointers-sum-bias-residual", **listed, scattered=True)
    yield case("f32-nn", "pointers-sum-even", **listed)
