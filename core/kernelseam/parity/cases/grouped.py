"""The parity cases of grouped GEMMs: groups along each axis, of any size, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.descriptors.gemm.grouped_problem import INDICES
from kernelseam.dtypes import E4M3
from kernelseam.samples.common import BF16, F16, F32
from kernelseam.samples.epilogues import PAIRS
from kernelseam.samples.grouped_case import GroupedCase, case

_F64 = frozenset({"shared"})
"""Matrix units for float64 are not on every arch; nor are those for e4m3, of which each has one
kind."""


def grouped_cases() -> list[GroupedCase]:
    grouped = [
        replace(c, group="grouped GEMM")
        for c in (*_cases(), *_indexed(), *_epilogues(), *_stored())
    ]
    assert len({c.name for c in grouped}) == len(grouped)
    return grouped


def _cases() -> Iterator[GroupedCase]:
    for ops in ("nn", "nt", "tn", "tt"):
        for along in "mnk":
            yield case(f"bf16-{along}-{ops}")
    for dtype in ("f16", "f32", "f64"):
        for kind in ("m-nn", "m-nt", "n-nn", "k-tn"):
            yield case(f"{dtype}-{kind}", may_refuse=_F64 if dtype == "f64" else frozenset())
    for kind in ("bf16-m-nn", "bf16-n-nn", "bf16-k-tn"):
        yield case(kind, "rest", rest=37)
        yield case(kind, "integers", data="integers")
        yield case(kind, "alpha-beta", alpha=2.5, beta=-0.5, rest=9)
        yield case(kind, "to-f32", dtype_c=F32)
        yield case(kind, "gaps", gap=24)
        yield case(kind, "one-group", sizes=(200,))
        yield case(kind, "one-each", sizes=(1,) * 40)
        yield case(kind, "all-in-the-last", sizes=(*(0,) * 33, 150))
        yield case(kind, "nothing", sizes=(0, 0, 0), rest=20)
        yield case(kind, "alpha-0", alpha=0.0, beta=0.5)
        yield case(kind, "aligned", sizes=(128, 64, 0, 256))
    yield case("bf16-m-nn", "no-groups", sizes=())
    yield case("bf16-m-nn", "no-columns", N=0)
    yield case("bf16-m-nn", "k-0", K=0, beta=0.5)
    yield case("bf16-m-nt", "k-1100", K=1100, N=40)
    yield case("bf16-m-nt", "1024-groups", sizes=(0, 1, 3, 0) * 256, K=40, N=24)
    yield case("bf16-k-tn", "positive", data="positive", sizes=(1030, 0, 7))
    for precision in ("tf32", "tf32x3"):
        refusing = {"precision": precision, "may_refuse": frozenset({"shared"})}
        yield case("f32-m-nn", precision, **refusing)
        yield case("f32-k-tn", precision, **refusing)


def _indexed() -> Iterator[GroupedCase]:
    """Rows that are gathered from A, scattered into C, and multiplied by factors."""
    a, c, factors = ((n,) for n in INDICES)
    for what, indices in (("gather", a), ("scatter", c), ("factors", factors), ("rows", INDICES)):
        yield case("bf16-m-nn", what, indices=indices)
        yield case("bf16-m-nn", f"{what}-integers", indices=indices, data="integers", rest=21)
    for kind in ("bf16-m-nt", "f16-m-nn", "f32-m-nn", "f64-m-nn"):
        refusing = _F64 if kind.startswith("f64") else frozenset[str]()
        yield case(kind, "rows", indices=INDICES, may_refuse=refusing)
    yield case("bf16-m-tn", "scatter", indices=(*c, *factors))
    whole: dict[str, object] = {"indices": INDICES, "alpha": 2.0}
    yield case("bf16-m-nn", "rows-alpha-beta", **{**whole, "beta": -0.5}, rest=9)
    yield case("bf16-m-nn", "rows-of-one", **whole, sizes=(1,) * 40, a_rows=3)
    yield case("bf16-m-nn", "rows-of-nothing", **whole, sizes=(0, 0, 0), rest=20)
    yield case("bf16-m-nn", "rows-to-f32", **whole, dtype_c=F32)
    yield case("bf16-m-nn", "rows-gaps", **whole, gap=3, N=77, K=45)
    yield case("bf16-m-nt", "rows-k-1100", **whole, K=1100, N=136, sizes=(200, 3, 64))
    yield case("bf16-m-nn", "rows-alpha-0", indices=INDICES, alpha=0.0, beta=0.5)


def _epilogues() -> Iterator[GroupedCase]:
    """Activations, gates, and functions that are told of a row, a column and the group. Not every
    host arch has a tile of one team for gates."""
    refusing = frozenset({"shared"})
    both: dict[str, object] = {"epilogue": "swiglu", "preactivation": True}
    for name in ("swiglu", "gelu", "in_turn", "checkerboard", "powers", "gated_options"):
        refused = refusing if name in PAIRS else frozenset[str]()
        yield case("bf16-m-nn", f"epilogue-{name}", epilogue=name, may_refuse=refused, rest=11)
    for kind in ("bf16-m-nt", "f16-m-nt", "f32-m-nn"):
        yield case(kind, "epilogue-both", **both)
        interleaved = {"epilogue": "interleaved_options", "may_refuse": refusing}
        yield case(kind, "epilogue-interleaved", **interleaved, rest=3)
    for what, fields in (
        ("rows", {"indices": INDICES}),
        ("gathered", {"indices": INDICES[:1]}),
        ("scattered", {"indices": INDICES[1:2], "rest": 21}),
    ):
        yield case("bf16-m-nt", f"epilogue-{what}", **both, **fields)
        gated = {"epilogue": "gated_options", "may_refuse": refusing, **fields}
        yield case("bf16-m-nn", f"epilogue-{what}", **gated)
    yield case("bf16-m-tn", "epilogue", epilogue="checkerboard", preactivation=True)
    yield case("bf16-m-nn", "epilogue-alpha-beta", epilogue="powers", alpha=2.5, beta=-0.5)
    yield case("bf16-m-nn", "epilogue-to-f32", **both, dtype_c=F32, may_refuse=refusing)
    yield case("f16-m-nn", "epilogue-ragged", **both, N=54, K=45, gap=3)
    yield case("f16-m-nn", "epilogue-k-0", epilogue="column_bias", K=0)
    yield case("f16-m-nn", "epilogue-one-each", epilogue="column_bias", sizes=(1,) * 40)
    yield case("f16-m-nn", "epilogue-integers", epilogue="relu", data="integers", dtype_c=F16)
    yield case("f64-m-nn", "epilogue", epilogue="gelu", may_refuse=refusing)


def _stored() -> Iterator[GroupedCase]:
    """Each case with either of the two dtypes of 8 bits."""
    for dtype in E4M3:
        short = dtype.value.removeprefix("float8_")
        for made in _of_8_bits():
            name = made.name.replace("f16", short)
            yield replace(made, name=name, dtype=dtype, may_refuse=_F64)


def _of_8_bits() -> Iterator[GroupedCase]:
    whole: dict[str, object] = {"dtype_c": BF16, "N": 80, "K": 272, "M": 80}
    for kind in ("f16-m-nt", "f16-m-nn", "f16-n-nt", "f16-k-nt"):
        yield case(kind, "rows", scales="rows", **whole)
    yield case("f16-m-nt", "tensor", scales="tensor", rest=11, **whole)
    yield case("f16-m-nt", "plain", **whole)
    yield case("f16-m-nt", "integers", scales="tensor", data="integers", **whole)
    deep: dict[str, object] = {**whole, "scales": "blocks", "scale_block": (1, 128, 128)}
    yield case("f16-m-nt", "blocks", **deep)
    yield case("f16-m-nt", "gathered", scales="rows", indices=INDICES, **whole)
    yield case("f16-m-nt", "blocks-gathered", indices=INDICES, **deep)
    yield case("f16-m-nt", "blocks-ragged", **{**deep, "N": 133, "K": 401, "rest": 5})
