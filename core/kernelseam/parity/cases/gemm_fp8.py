"""GEMM cases with A and B of 8 bits: every layout, view, sum and epilogue, scales of a tensor, a
matrix, rows and columns, and blocks of them along K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.dtypes import E4M3, DType
from kernelseam.samples.common import (
    BF16,
    F16,
    F32,
    NAN,
    ODD,
    SHORT_8_BITS,
    TOKENS,
    InjectedValue,
)
from kernelseam.samples.gemm_case import GemmCase, case
from kernelseam.samples.operand_layout import OperandLayout

_ARCHS = frozenset({"shared"})
"""An arch multiplies one of the two, or none."""
_TIGHT = OperandLayout(aligned=False)


def stored() -> Iterator[GemmCase]:
    """Each case with either of the two dtypes."""
    for result in _cases():
        for dtype in E4M3:
            name = result.name.replace("8-bit", SHORT_8_BITS[dtype])
            to = dtype if result.dtype_c is DType.float8_e4m3fn else result.dtype_c
            yield replace(result, name=name, dtype=dtype, dtype_c=to, may_refuse=_ARCHS)


def _case(ops: str, what: str, **fields: object) -> GemmCase:
    """By default with rows of whole chunks of 16 bytes, and scales: each other is compiled."""
    whole = {"dtype_c": BF16, "M": 144, "N": 144, "K": 272, "scales": "rows"}
    result = case(f"f16-{ops}", what, **{**whole, **fields})
    return replace(result, name=result.name.replace("f16", "8-bit"))


def _cases() -> Iterator[GemmCase]:
    for ops in ("nn", "nt", "tn", "tt"):
        yield _case(ops, "")
        yield _case(ops, "integers", data="integers", scales="tensor")
    for c in (F16, F32):
        yield _case("nt", f"to-{c}", dtype_c=c, M=130, scales="matrices")
        yield _case("nt", f"to-{c}-beta", dtype_c=c, M=130, beta=-0.5)
    yield _case("nt", "to-8-bit", dtype_c=DType.float8_e4m3fn, M=130, bias=F32)
    for M, N, K in ((1, 1, 1), (7, 63, 65), (65, 129, 7), (1, 145, 529), (131, 9, 401)):
        yield _case("nt", f"ragged-{M}x{N}x{K}", M=M, N=N, K=K)
    for ops in ("nt", "nn"):
        yield _case(ops, "large", M=1100, N=1040, K=528, sample=300)
        yield _case(ops, "unaligned", M=7, N=67, K=65, a=_TIGHT, b=_TIGHT, c=_TIGHT)
        yield _case(ops, "odd", a=ODD, b=ODD, c=ODD)
    yield _case("nt", "one-row", M=1)
    yield _case("nt", "one-slice", M=64, N=64, K=16)
    yield _case("nt", "long", K=4112, M=33, N=40, batch=1, scales="tensor")
    yield _case("nt", "long-positive", K=4112, M=33, N=40, batch=1, data="positive")
    yield _case("nt", "group", num_heads=6, b_head_group=3, a=TOKENS, b=TOKENS)
    added: dict[str, object] = {"bias": BF16, "residual": BF16, "residual_layout": TOKENS}
    yield _case("nt", "added", **added, alpha=2.5, beta=0.5)
    yield _case("nt", "k-0", K=0, beta=0.5)
    yield _case("nt", "no-rows", M=0)
    yield _case("nt", "alpha-0", alpha=0, injected=(InjectedValue("A", NAN, (0, 1, 2, 3)),))
    nan = (InjectedValue("A", NAN, (0, 1, 5, 6)), InjectedValue("B", NAN, (1, 2, 7, 6)))
    yield _case("nt", "nan", injected=nan)
    scaled = (InjectedValue("a_scales", NAN, (0, 1, 5)), InjectedValue("b_scales", NAN, (1, 2, 7)))
    yield _case("nt", "nan-scales", injected=scaled)
    yield _case("nt", "300-of-16x16x32", M=16, N=16, K=32, batch=60, num_heads=5, scales="matrices")
    for ops, sizes in (("nt", (1, 128, 128)), ("nn", (1, 128, 128)), ("nt", (1, 1, 64))):
        what = "blocks-" + "x".join(map(str, sizes))
        yield _case(ops, what, scales="blocks", scale_block=sizes, K=528, batch=1)
    deep: dict[str, object] = {"scales": "blocks", "scale_block": (1, 128, 128)}
    yield _case("nt", "blocks-of-rows", **{**deep, "scale_block": (128, 128, 256)}, K=400)
    yield _case("nt", "blocks-of-32", **{**deep, "scale_block": (1, 1, 32)}, batch=1)
    yield _case("nt", "blocks-ragged", **deep, M=7, N=133, K=401)
    yield _case("nt", "blocks-long", **deep, M=33, N=40, K=4112, batch=1)
    yield _case("nt", "blocks-group", **deep, num_heads=6, b_head_group=3, M=33)
    yield _case("nt", "blocks-integers", **deep, data="integers", K=272)
    yield _case("nt", "blocks-added", **deep, bias=BF16, residual=BF16, alpha=2.5, beta=0.5)
    yield _case("nt", "blocks-k-0", **deep, K=0, beta=0.5)
    broken = tuple(InjectedValue(n, NAN, (0, 1, 1, 1)) for n in ("a_scales", "b_scales"))
    yield _case("nt", "blocks-nan-scales", **deep, injected=broken)
    bare: dict[str, object] = {"scales": ""}
    yield _case("nt", "plain", **bare)
    yield _case("nt", "sum", batch=4, c_batch_group=2, num_heads=6, c_head_group=3, **bare)
    yield _case("nt", "pointers", view="host", scattered=True, **bare)
    yield _case("nt", "pointers-scales", view="host", scattered=True)
    yield _case("nt", "pointers-device", view="device", scattered=True)
    yield _case("nt", "pointers-even", view="host", beta=0.5)
    yield _case("nt", "pointers-scales-k-0", view="host", scattered=True, K=0)
