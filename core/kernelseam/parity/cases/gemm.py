"""The batched GEMM's rows of the parity matrix.

Extents, strides and values vary freely; specs (dtypes, transposes, view, alignment) are few, for
each is a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.parity.cases.gemm_added import added, sums
from kernelseam.parity.cases.gemm_epilogues import epilogues
from kernelseam.parity.cases.gemm_fp8 import stored
from kernelseam.samples.common import (
    BF16,
    F16,
    F32,
    GEMV,
    INF,
    NAN,
    ODD,
    SHORT,
    TOKENS,
    InjectedValue,
)
from kernelseam.samples.gemm_case import TALL, GemmCase, both, case
from kernelseam.samples.operand_layout import OperandLayout

TIGHT = OperandLayout(aligned=False)
RAGGED = (
    (1, 1, 1),
    (7, 63, 64),
    (64, 64, 63),
    (65, 129, 7),
    (129, 1, 130),
    (1, 129, 64),
    (17, 65, 257),
)


def gemm_cases() -> list[GemmCase]:
    groups = {
        "dtypes and shapes": _shapes,
        "strides and layouts": _layouts,
        "alpha and beta": _scalars,
        "values at the edge": _values,
        "pointer lists": _pointers,
        "bias and residual": added,
        "sums over batches and heads": sums,
        "epilogues": epilogues,
        "many small matrices": _small,
        "few rows or few columns": _few,
        "precision of float32": _precisions,
        "factors of 8 bits": stored,
    }
    grouped = [
        replace(c, group=group, may_refuse=c.may_refuse | {GEMV})
        for group, cases in groups.items()
        for c in cases()
    ]
    assert len({c.name for c in grouped}) == len(grouped)
    return grouped


def _shapes() -> Iterator[GemmCase]:
    for dtype in SHORT:
        for ops in ("nn", "nt", "tn", "tt"):
            yield case(f"{dtype}-{ops}")
    for kind in ("f16-nt", "f32-nn", "bf16-nn"):
        for M, N, K in RAGGED:
            yield case(kind, f"ragged-{M}x{N}x{K}", M=M, N=N, K=K, batch=1, num_heads=2)
    for kind in ("f16-nt", "f32-nn"):
        yield case(kind, "no-rows", M=0)
        yield case(kind, "no-columns", N=0)
        yield case(kind, "no-batch", batch=0)
        yield case(kind, "no-heads", num_heads=0)
    yield case("f16-nt", "66000-matrices", M=3, N=5, K=4, batch=33000, num_heads=2, sample=1000)
    for kind in ("f16-nt", "bf16-nn", "f32-nn"):  # enough blocks for a large tile to pay off
        yield case(kind, "large", M=1100, N=1032, K=70, sample=300)
    yield case("f16-nt", "to-f32", dtype_c=DType.float32)
    yield case("f16-nt", "to-f32-beta", dtype_c=DType.float32, beta=0.5, M=7, N=129, K=64)
    yield case("bf16-nn", "to-f32", dtype_c=DType.float32, K=130)
    yield case("f64-nn", "to-f32", dtype_c=DType.float32, may_refuse=frozenset({"shared"}))


def _layouts() -> Iterator[GemmCase]:
    for kind in ("f16-nn", "f16-nt", "f16-tn", "f16-tt", "f32-nn", "f32-nt", "bf16-nn", "f64-tn"):
        yield case(kind, "unaligned", M=7, N=67, K=65, a=TIGHT, b=TIGHT, c=TIGHT)
    for operand in ("a", "b", "c"):
        yield case("f16-nt", f"odd-{operand}", **{operand: ODD})
    yield case("f32-nn", "odd-abc", a=ODD, b=ODD, c=ODD)
    gaps = OperandLayout(gaps=(40, 24, 8))
    for kind in ("f16-nt", "f32-nn"):
        yield case(kind, "gaps", a=gaps, b=gaps, c=gaps)
        yield case(kind, "gaps-beta", a=gaps, b=gaps, c=gaps, beta=-0.5)
        yield case(kind, "token-major-in", a=TOKENS, b=TOKENS)
        yield case(kind, "token-major-out", c=TOKENS)
        yield case(
            kind,
            "token-major-gaps",
            **dict.fromkeys("abc", OperandLayout(order="brh", gaps=(64, 8, 16))),
        )
        yield case(kind, "same-a-batch", a=OperandLayout(broadcast="b"))
        yield case(kind, "same-b-heads", b=OperandLayout(broadcast="h"))
        yield case(kind, "same-b-all", b=OperandLayout(broadcast="bh"))
        yield case(kind, "same-a-rows", a=OperandLayout(broadcast="r"))
        yield case(kind, "tall-beta", a=gaps, b=gaps, c=gaps, beta=-0.5, **TALL)
    yield case("bf16-tn", "tall", **TALL)
    for kind in ("f16-nt", "bf16-nn"):
        yield case(kind, "b-group-2", num_heads=6, b_head_group=2)
        yield case(kind, "b-group-all", num_heads=4, b_head_group=4, b=TOKENS)


def _scalars() -> Iterator[GemmCase]:
    nan_inputs = (
        InjectedValue("A", NAN, (0, None, 1, 2)),
        InjectedValue("B", INF, (0, None, 2, 1)),
    )
    for kind in ("f16-nn", "f32-nn"):
        yield case(kind, "alpha-half", alpha=0.5)
        yield case(kind, "alpha-minus-one-beta-one", alpha=-1, beta=1)
        yield case(kind, "alpha-beta", alpha=2.5, beta=-0.5, M=129, K=64)
        yield case(kind, "alpha-0-beta-0-nan-in", alpha=0, injected=nan_inputs)
        yield case(kind, "alpha-0-beta-half-nan-in", alpha=0, beta=0.5, injected=nan_inputs)
        yield case(kind, "k-0", K=0)
        yield case(kind, "k-0-beta-half", K=0, beta=0.5)
        old = (InjectedValue("C", NAN, (0, 1, 3, 4)), InjectedValue("C", -INF, (1, 0, 0, 0)))
        yield case(kind, "nan-in-c-beta-one", beta=1, injected=old)
        # C starts as NaN in any case
        yield case(kind, "beta-0-nan-in-c", injected=(InjectedValue("C", NAN, (None,) * 4),))


def _values() -> Iterator[GemmCase]:
    for kind in ("f16-nn", "f16-nt", "f16-tn", "f16-tt", "bf16-nt", "f32-nn", "f64-nn"):
        yield case(kind, "integers", data="integers", M=65, N=130, K=129)
    yield case("f16-nt", "integers-scaled", data="integers", alpha=2, beta=-1)
    # most results lie between two representable values, some exactly halfway
    for kind in ("f16-nt", "bf16-nt"):
        yield case(kind, "integers-rounded", data="integers", alpha=201, M=65, N=130, K=129)
    yield case("f16-nt", "integers-to-f32", data="integers", dtype_c=DType.float32, K=257)
    for kind in ("f16-nt", "f32-nn", "bf16-nn"):
        yield case(kind, "nan-in-a", injected=(InjectedValue("A", NAN, (0, 1, 5, 6)),))
        yield case(kind, "nan-in-b", injected=(InjectedValue("B", NAN, (1, 2, 7, 6)),))
        yield case(
            kind,
            "inf-in-a",
            injected=(
                InjectedValue("A", INF, (0, 1, 5, 6)),
                InjectedValue("A", -INF, (1, 0, 64, 32)),
            ),
        )
    zero_meets_inf = (InjectedValue("A", INF, (0, 0, 3, 4)), InjectedValue("B", 0.0, (0, 0, 9, 4)))
    yield case("f16-nt", "inf-times-zero", injected=zero_meets_inf)
    opposite = (
        InjectedValue("A", INF, (0, 0, 3, None)),
        InjectedValue("B", 1.0, (0, 0, 2, None)),
        InjectedValue("B", -1.0, (0, 0, 2, 8)),
    )
    yield case("f16-nt", "inf-minus-inf", injected=opposite)
    yield case("f16-nt", "overflow", data="huge")
    yield case("f16-nt", "subnormal", data="tiny")
    yield case("f16-nn", "long", K=2049, M=33, N=40, batch=1)
    yield case("f16-nn", "long-positive", K=2049, M=33, N=40, batch=1, data="positive")
    yield case("f32-nn", "long-positive", K=2049, M=33, N=40, batch=1, data="positive")
    yield case("bf16-nn", "long-positive", K=1023, M=33, N=40, batch=1, data="positive")


def _pointers() -> Iterator[GemmCase]:
    for kind in ("f16-nt", "f32-nn", "bf16-tn", "f64-tt"):
        yield case(kind, "pointers", view="host", scattered=True)
    yield case("f16-nt", "pointers-ragged", view="host", scattered=True, M=129, N=7, K=65)
    yield case("f16-nt", "pointers-integers", view="host", scattered=True, data="integers")
    yield case("f16-nt", "pointers-even", view="host")
    yield case("f16-nt", "pointers-device", view="device", scattered=True)
    yield case("f16-nt", "pointers-device-even", view="device")
    yield case("f16-nt", "pointers-odd", view="host", scattered=True, a=ODD, b=ODD, c=ODD)
    yield case(
        "f16-nt",
        "pointers-gaps-beta",
        view="host",
        scattered=True,
        beta=0.5,
        c=OperandLayout(gaps=(0, 0, 8)),
    )
    yield case("f16-nt", "pointers-300", view="host", scattered=True, M=8, N=8, K=8, batch=100)
    yield case(
        "f32-nn", "pointers-same-a", view="host", a=OperandLayout(broadcast="bh"), scattered=True
    )
    yield case("f32-nn", "pointers-k-0", view="host", scattered=True, K=0, beta=0.5)
    nan = (InjectedValue("A", NAN, (0, 0, 0, 0)),)
    yield case("f32-nn", "pointers-alpha-0", view="host", scattered=True, alpha=0, injected=nan)
    yield case("f32-nn", "pointers-none", view="host", batch=0)


def _small() -> Iterator[GemmCase]:
    for name, kind, M, N, K in (
        ("8x8x8", "f16-nt", 8, 8, 8),
        ("16x16x16", "f16-nt", 16, 16, 16),
        ("16x16x16", "f32-nn", 16, 16, 16),
    ):
        yield case(kind, f"4096-of-{name}", M=M, N=N, K=K, batch=1024, num_heads=4, sample=2000)
        yield case(kind, f"35-of-{name}", M=M, N=N, K=K, batch=7, num_heads=5)
    odd = {"M": 5, "N": 7, "K": 3, "a": TIGHT, "b": TIGHT, "c": TIGHT}
    yield case("f32-nn", "4096-of-5x7x3", batch=64, num_heads=64, sample=2000, **odd)
    yield case("f32-nn", "33-of-5x7x3", batch=11, num_heads=3, beta=0.5, **odd)
    # More than the compute units of the largest device, few enough for slow ones: several tiles per
    # block pay off.
    ragged = {"M": 13, "N": 11, "K": 9, "num_heads": 5}
    yield case("f16-nt", "310-of-13x11x9-bias-residual", **both(F16, batch=62, **ragged))
    for kind in ("f16-nt", "f32-nn"):
        yield case(kind, "310-of-13x11x9-sum-beta", beta=0.5, batch=124, c_batch_group=2, **ragged)
    yield case("f16-nt", "17-of-40x24x16", M=40, N=24, K=16, batch=17, num_heads=1)
    yield case(
        "f16-nt",
        "35-of-16x16x16-bias-residual",
        **both(F16, M=16, N=16, K=16, batch=7, num_heads=5),
    )
    yield case(
        "f16-nt", "35-of-16x16x16-sum", M=16, N=16, K=16, batch=35, num_heads=3, c_batch_group=7
    )


def _few() -> Iterator[GemmCase]:
    """Vectors by matrices: what is read once, whichever way it lies, and sums that are cut."""
    for dtype, ops in (("f16", "nt"), ("bf16", "nn"), ("f32", "tn"), ("f64", "tt")):
        for few in (1, 3, 4):
            yield case(f"{dtype}-{ops}", f"{few}-rows", M=few, N=200, K=344)
            yield case(f"{dtype}-{ops}", f"{few}-columns", M=200, N=few, K=344)
    for kind in ("f16-nt", "f16-nn"):
        yield case(kind, "2-rows-long", M=2, N=72, K=4104, batch=1, sample=2)
        yield case(kind, "3-rows-beta", M=3, N=130, K=72, **both(F16, alpha=2.5, beta=-0.5))
        yield case(kind, "3-columns-beta", M=130, N=3, K=72, **both(F16, alpha=2.5, beta=-0.5))
        yield case(kind, "1-row-group", M=1, N=136, K=64, num_heads=6, b_head_group=2)
        yield case(kind, "1-column-group", M=136, N=1, K=64, num_heads=6, b_head_group=2)
        yield case(
            kind, "1-row-nan", M=1, N=136, K=64, injected=(InjectedValue("B", NAN, (0, 0, 5, 7)),)
        )
    lists: dict[str, Any] = {"view": "host", "scattered": True}
    yield case("bf16-nt", "4-rows-pointers", M=4, N=100, K=136, **lists, **both(BF16))
    yield case("f16-tn", "4-columns-pointers", M=104, N=4, K=130, **lists, dtype_c=F32, bias=F32)


def _precisions() -> Iterator[GemmCase]:
    """TF32 and 3xTF32, which not every arch supports."""
    for precision in ("tf32", "tf32x3"):
        ways: dict[str, object] = {"precision": precision, "may_refuse": frozenset({"shared"})}
        for ops in ("nn", "nt", "tn", "tt"):
            yield case(f"f32-{ops}", precision, **ways)
        for M, N, K in RAGGED:
            yield case(
                "f32-nt",
                f"{precision}-ragged-{M}x{N}x{K}",
                M=M,
                N=N,
                K=K,
                batch=1,
                num_heads=2,
                **ways,
            )
        yield case("f32-nt", f"{precision}-one-product", K=1, **ways)  # no errors cancel
        yield case("f32-nn", f"{precision}-large", M=1100, N=1032, K=70, sample=300, **ways)
        yield case(
            "f32-nn", f"{precision}-unaligned", M=7, N=67, K=65, a=TIGHT, b=TIGHT, c=TIGHT, **ways
        )
        yield case("f32-nn", f"{precision}-alpha-beta", alpha=2.5, beta=-0.5, M=129, K=64, **ways)
        yield case("f32-nn", f"{precision}-k-0", K=0, beta=0.5, **ways)
        yield case(
            "f32-nn",
            f"{precision}-sum-bias-residual",
            num_heads=6,
            c_head_group=3,
            **both(F32, **ways),
        )
        yield case("f32-nn", f"{precision}-pointers", view="host", scattered=True, **ways)
        yield case("f32-nn", f"{precision}-integers", data="integers", M=65, N=130, K=129, **ways)
        yield case("f32-nn", f"{precision}-long", K=2049, M=33, N=40, batch=1, **ways)
        yield case(
            "f32-nn",
            f"{precision}-long-positive",
            K=2049,
            M=33,
            N=40,
            batch=1,
            data="positive",
            **ways,
        )
        yield case(
            "f32-nn",
            f"{precision}-nan-in-b",
            injected=(InjectedValue("B", NAN, (1, 2, 7, 6)),),
            **ways,
        )
        inf = (
            InjectedValue("A", INF, (0, 1, 5, 6)),
            InjectedValue("A", -INF, (1, 0, 64, 32)),
            InjectedValue("B", 1.0, (0, 1, 6, None)),
        )
        yield case("f32-nn", f"{precision}-inf-in-a", injected=inf, **ways)
        yield case(
            "f32-nn",
            f"{precision}-inf-times-zero",
            **ways,
            injected=(InjectedValue("A", INF, (0, 0, 3, 4)), InjectedValue("B", 0.0, (0, 0, 4, 9))),
        )
