"""The parity cases that merge partial attentions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelseam.samples.common import ODD, TOKENS
from kernelseam.samples.merge_case import MergeCase, case
from kernelseam.samples.operand_layout import OperandLayout


def merge_cases() -> list[MergeCase]:
    grouped = [replace(c, group="merged states") for c in _cases()]
    assert len({c.name for c in grouped}) == len(grouped)
    return grouped


def _cases() -> Iterator[MergeCase]:
    for kind in ("f32-f16", "f32-bf16", "f32-f32", "f16-f16", "bf16-bf16", "bf16-f32"):
        yield case(kind)
    for kind in ("f64-f64", "f64-f32"):
        yield case(kind, may_refuse=frozenset({"shared"}))
    yield case("f64-f64", "apart", data="apart", may_refuse=frozenset({"shared"}))
    gaps = OperandLayout(gaps=(48, 24, 8))
    for n in (0, 1, 2, 19):
        yield case("f32-f16", f"parts-{n}", parts=n)
    for data in ("apart", "absent", "nothing", "nan", "inf"):
        yield case("f32-f16", data, data=data)
    yield case("f32-f16", "no-lse", lse=False)
    yield case("f32-f16", "gaps", outs=gaps, out=gaps, part_gap=40)
    yield case("f32-f16", "bshd", outs=TOKENS, out=TOKENS)
    yield case("f32-f16", "odd", outs=ODD, out=ODD)
    yield case(
        "f32-f32",
        "dim-33",
        value_dim=33,
        outs=OperandLayout(aligned=False),
        out=OperandLayout(aligned=False),
    )
    yield case("f32-bf16", "dim-512", value_dim=512, rows=1, parts=7)
    yield case("f32-f16", "no-rows", rows=0)
    yield case("f32-f16", "no-batch", batch=0)
