"""The parity cases that move rows between tokens and the pages of a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelseam.dtypes import E4M3, DType
from kernelseam.samples.cache_case import CacheCase, case
from kernelseam.samples.common import BF16, F16, F32, ODD, SHORT, TOKENS
from kernelseam.samples.operand_layout import OperandLayout

_OTHER_FP8 = frozenset({"shared"})
"""Archs convert one of the two types of 8 bits, or none."""


def cache_cases() -> list[CacheCase]:
    grouped = [replace(c, group="paged caches") for c in _cases()]
    assert len({c.name for c in grouped}) == len(grouped)
    return grouped


def _cases() -> Iterator[CacheCase]:
    of_q: dict[str, Any] = {"num_heads": 4, "rotary": "halves"}
    normed: dict[str, Any] = {**of_q, "norm": F32}
    for kind in SHORT:
        refuse = frozenset({"shared"}) if kind == "f64" else frozenset[str]()
        yield case(kind, may_refuse=refuse)
        yield case(kind, "norm-rotary", **normed, may_refuse=refuse)
        yield case(kind, direction="gather", may_refuse=refuse)
        yield case(kind, direction="copy", S=4, may_refuse=refuse)
    yield from _places()
    yield case("f16", "rotary", **of_q)
    yield case("f16", "pairs", num_heads=4, rotary="pairs", rotary_dim=24)
    yield case("bf16", "halves-48", num_heads=3, rotary="halves", rotary_dim=48)
    yield case("f16", "halves-20", num_heads=3, rotary="halves", rotary_dim=20, norm=F16)
    yield case("f16", "norm", num_heads=4, norm=F16)
    yield case("f16", "norm-in-place", **normed, in_place=True)
    yield case("bf16", "keys-alone", rotary="halves", norm=BF16)
    yield case("f16", "wide-heads", **normed, head_dim=256, value_dim=512, page_size=3)
    yield case("f32", "dim-36", **normed, head_dim=36, value_dim=20)
    yield case("f16", "no-v", value_dim=0, head_dim=128)
    yield case("f16", "no-tokens", S=0)
    yield case("f16", "no-entries", batch=0)
    yield case("f16", "nan", **normed, data="nan")
    apart = OperandLayout(gaps=(40, 8, 16))
    of_tokens = dict.fromkeys(("k", "v", "k_pages", "v_pages", "q", "q_out"), TOKENS)
    yield case("f16", "nhd", of_tokens, **of_q)
    yield case("f16", "gaps", dict.fromkeys(("k", "v", "k_pages", "v_pages"), apart))
    yield case("f16", "odd", {"k": ODD, "v_pages": ODD}, **of_q)
    yield case("f16", "f32-pages", dtype_pages=F32)
    yield case("f32", "f16-pages", direction="gather", dtype_pages=F16)
    for stored in E4M3:
        yield from _of_8_bits(stored)


def _places() -> Iterator[CacheCase]:
    packed = (3, 0, 6, 1, *(0, 1) * 33)  # more than a warp of 32 looks at at once
    for direction in ("append", "gather"):
        for places in ("slots", "slots64"):
            yield case("bf16", places, direction=direction, places=places, position="")
        yield case("f16", "own-number", direction=direction, position="")
        for position in ("lengths", "") if direction == "append" else ("",):
            what = f"packed-{position or 'own-number'}"
            yield case("f16", what, direction=direction, packed=packed, position=position)
    yield case("f16", "given", position="given")
    rotated: dict[str, Any] = {"num_heads": 2, "rotary": "halves", "position": "given"}
    yield case("f16", "packed-given", packed=packed, **rotated)
    yield case("f16", "slots-rotary", places="slots", **rotated)


def _of_8_bits(stored: DType) -> Iterator[CacheCase]:
    short = "e4m3" if stored is DType.float8_e4m3fn else "e4m3fnuz"
    given: dict[str, Any] = {"dtype_pages": stored, "may_refuse": _OTHER_FP8}
    for scaled in ("", "heads", "tokens"):
        what = f"{short}-{scaled or 'unscaled'}"
        yield case("bf16", what, scaled=scaled, **given)
        if scaled:
            yield case("f16", what, direction="gather", scaled=scaled, **given)
    yield case("f32", f"{short}-narrow", scaled="tokens", head_dim=36, value_dim=20, **given)
    yield case("f16", f"{short}-nan", scaled="heads", data="nan", **given)
    for direction in ("append", "gather", "copy"):
        rows = 4 if direction == "copy" else 5
        yield case(short, dtype=stored, direction=direction, S=rows, **given)
    if stored is not DType.float8_e4m3fn:
        return
    everything: dict[str, Any] = {"num_heads": 4, "rotary": "halves", "norm": F32, **given}
    yield case("bf16", f"{short}-everything", scaled="tokens", packed=(3, 5), **everything)
    yield case("bf16", f"{short}-zeros", scaled="tokens", data="zeros", **everything)
    yield case("bf16", f"{short}-wide", scaled="tokens", data="wide", **given)
    yield case("f16", f"{short}-saturated", scaled="heads", data="wide", **given)
    yield case("f64", f"{short}", scaled="tokens", **given)
