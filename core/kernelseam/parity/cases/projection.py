"""The rows of the parity matrix about the projections themselves; their gradients are in
``projection_bwd``.

Extents, strides, positions and values vary freely; specs (dtypes, options, alignment) are few, for
each is a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.dtypes import E4M3, DType
from kernelseam.samples.common import INF, NAN, ODD, SHORT, TOKENS, InjectedValue
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.projection_case import ProjectionCase, case

F16, F32 = SHORT["f16"], SHORT["f32"]
GAPS, TIGHT = OperandLayout(gaps=(64, 24, 8)), OperandLayout(aligned=False)
APART = OperandLayout(gaps=(32, 0, 0))
"""Batch entries with a gap between them: their tokens are not rows of one matrix."""
QKV, OUT = "qkv_projection", "output_projection"


def grouped(groups: Mapping[str, Iterator[ProjectionCase]]) -> list[ProjectionCase]:
    """The cases of groups, each with its group's name."""
    cases_of_groups = [replace(c, group=group) for group, cases in groups.items() for c in cases]
    assert len({c.name for c in cases_of_groups}) == len(cases_of_groups)
    return cases_of_groups


def projection_cases() -> list[ProjectionCase]:
    return grouped(
        {
            "projection to q, k and v": _qkv(),
            "rotary embedding": _rotary(),
            "k and v into pages": _pages(),
            "k and v appended to pages": _appended(),
            "projection to whole tiles of heads": _tiles(),
            "projection of an attention's result": _output(),
        }
    )


def of_qkv(operand_layout: OperandLayout) -> dict[str, OperandLayout]:
    """The same layout for q, k and v."""
    return dict.fromkeys("qkv", operand_layout)


def _qkv() -> Iterator[ProjectionCase]:
    for kind in ("f16", "f32"):
        yield case(QKV, kind)
    yield case(QKV, "f16", "bias", bias=F16)
    yield case(QKV, "bf16", "bias-f32", bias=F32)
    yield case(QKV, "f16", "to-f32", dtype_out=F32)
    for heads, kv_heads, dim in ((3, 3, 64), (8, 1, 80), (2, 1, 128), (5, 2, 33)):
        yield case(
            QKV,
            "f16",
            f"heads-{heads}-{kv_heads}-{dim}",
            num_heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
        )
    for S, hidden in ((1, 64), (65, 8), (129, 264)):
        yield case(QKV, "f16", f"ragged-{S}x{hidden}", S=S, hidden=hidden)
    tight = {"input": TIGHT, "weight": TIGHT}
    yield case(QKV, "f16", "unaligned", tight, S=7, hidden=67, bias=F16)
    yield case(QKV, "f32", "unaligned", {**tight, **of_qkv(ODD)}, S=7, hidden=1, head_dim=5)
    for kind in ("f16", "f32"):
        yield case(QKV, kind, "token-major", of_qkv(TOKENS))
        yield case(QKV, kind, "packed", packed=True, head_dim=64)
        yield case(QKV, kind, "gaps", {"input": GAPS, "weight": GAPS, **of_qkv(GAPS)})
        yield case(QKV, kind, "entries-apart", {"input": APART})
        yield case(QKV, kind, "no-batch", batch=0)
        yield case(QKV, kind, "no-tokens", S=0)
    yield case(QKV, "f16", "one-entry", batch=1, S=70, bias=F16)
    yield case(QKV, "f16", "one-input", {"input": OperandLayout(broadcast="b")})
    yield case(QKV, "f16", "decode", {"input": APART, "q": TOKENS, "k": GAPS}, S=1, batch=5)
    yield case(QKV, "f16", "odd-q", {"q": ODD})
    yield case(QKV, "f16", "no-hidden", hidden=0, bias=F16)
    yield case(QKV, "f16", "integers", data="integers", bias=F16, S=65)
    yield case(QKV, "f16", "positive", data="positive", hidden=1032, S=17)
    yield case(QKV, "f16", "few-tokens", S=9, hidden=1096, head_dim=64, bias=F16)
    nan = (
        InjectedValue("input", NAN, (0, 0, 5, 6)),
        InjectedValue("input", INF, (1, 0, 0, 71)),
        InjectedValue("input", -INF, (1, 0, 32, 0)),
    )
    for kind in ("f16", "f32"):
        yield case(QKV, kind, "nan-in-input", injected=nan)
    yield case(QKV, "f16", "nan-in-weight", injected=(InjectedValue("weight", NAN, (0, 0, 33, 7)),))


def _rotary() -> Iterator[ProjectionCase]:
    for kind, style in (
        ("f16", "halves"),
        ("f16", "pairs"),
        ("bf16", "halves"),
        ("f32", "pairs"),
        ("f64", "halves"),
    ):
        yield case(QKV, kind, f"rotary-{style}", rotary=style, bias=F32)
    for style in ("halves", "pairs"):
        more: dict[str, Any] = {"rotary": style, "bias": F32}
        for dim, rotated in ((64, 64), (128, 128), (80, 20), (80, 32), (40, 2)):
            what = f"rotary-{style}-{rotated}-of-{dim}"
            yield case(QKV, "f16", what, head_dim=dim, rotary_dim=rotated, S=20, **more)
        yield case(QKV, "f16", f"rotary-{style}-from-17", of_qkv(TOKENS), first_position=17, **more)
        yield case(
            QKV, "f16", f"rotary-{style}-entries-apart", {"input": APART, **of_qkv(GAPS)}, **more
        )
        nan = (
            InjectedValue("input", NAN, (0, 0, 5, 6)),
            InjectedValue("cos", INF, (4, 3)),
            InjectedValue("sin", NAN, (9, 0)),
        )
        yield case(QKV, "f16", f"rotary-{style}-nan", injected=nan, **more)
    positioned: dict[str, Any] = {"rotary": "halves", "bias": F32, "positions": True}
    yield case(QKV, "f16", "rotary-halves-positions", **positioned)
    yield case(QKV, "f16", "rotary-halves-positions-apart", {"input": APART}, **positioned)
    yield case(QKV, "f16", "rotary-halves-odd", of_qkv(ODD), rotary="halves", bias=F32)
    yield case(
        QKV, "f16", "rotary-halves-packed", rotary="halves", bias=F32, packed=True, head_dim=64
    )
    yield case(QKV, "f16", "rotary-halves-decode", S=1, batch=7, **positioned)


def _tiles() -> Iterator[ProjectionCase]:
    """Heads of whole panels, and entries that are one matrix, of whole boxes of rows, or neither:
    what kernels with a tensor map for each operand store by it, and what they do not."""
    one: dict[str, Any] = {"batch": 1, "S": 200, "num_heads": 3, "kv_heads": 1, "hidden": 264}
    for kind, dim in (("f16", 64), ("bf16", 128), ("f16", 256)):
        yield case(QKV, kind, f"tiles-{dim}", of_qkv(TOKENS), head_dim=dim, bias=F32, **one)
    boxes: dict[str, Any] = {"batch": 3, "S": 128, "head_dim": 64}
    yield case(QKV, "f16", "tiles-boxes", bias=F32, **boxes)
    yield case(QKV, "f16", "tiles-boxes-packed", packed=True, bias=F32, **boxes)
    apart: dict[str, Any] = {"batch": 3, "S": 100, "head_dim": 128}
    yield case(QKV, "f16", "tiles-entries-apart", {"input": APART, **of_qkv(GAPS)}, **apart)
    yield case(QKV, "f16", "tiles-short-entries-apart", {"input": APART}, S=20, head_dim=64)
    yield case(QKV, "f16", "tiles-entries-end-within", bias=F32, **apart)
    for style in ("halves", "pairs"):
        rotated: dict[str, Any] = {"rotary": style, "bias": F32}
        for dim, some in ((64, 64), (128, 128), (128, 64), (256, 256)):
            what = f"tiles-{style}-{some}-of-{dim}"
            yield case(QKV, "f16", what, head_dim=dim, rotary_dim=some, **one, **rotated)
        positioned_rotary = {"positions": True, **rotated}
        yield case(QKV, "f16", f"tiles-{style}-positions", **boxes, **positioned_rotary)
        yield case(
            QKV,
            "f16",
            f"tiles-{style}-entries-apart",
            {"input": APART},
            **apart,
            **positioned_rotary,
        )
        yield case(QKV, "f16", f"tiles-{style}-entries-end-within", **apart, **positioned_rotary)
        yield case(QKV, "f16", f"tiles-{style}-96", head_dim=96, S=70, **rotated)
        yield case(QKV, "f16", f"tiles-{style}-pages", page_size=16, **apart, **positioned_rotary)


def _pages() -> Iterator[ProjectionCase]:
    rotated: dict[str, Any] = {"rotary": "halves", "positions": True, "bias": F32}
    for size in (1, 16, 24):
        yield case(QKV, "f16", f"pages-{size}", page_size=size)
        yield case(QKV, "f16", f"pages-{size}-rotary", page_size=size, **rotated)
    yield case(QKV, "f32", "pages-16-from-9", page_size=16, first_position=9)
    operand_layouts = {"k": OperandLayout(order="brh", gaps=(8, 16, 8)), "v": TOKENS, "q": TOKENS}
    yield case(QKV, "f16", "pages-24-token-major", operand_layouts, page_size=24, first_position=5)
    yield case(QKV, "f16", "pages-16-decode", page_size=16, S=1, batch=9, **rotated)
    yield case(QKV, "f16", "pages-16-entries-apart", {"input": APART}, page_size=16)
    yield case(QKV, "f16", "pages-16-no-tokens", page_size=16, S=0)
    nan = (InjectedValue("input", NAN, (0, 0, 5, 6)), InjectedValue("input", NAN, (1, 0, 32, 0)))
    yield case(QKV, "f16", "pages-16-nan-in-input", page_size=16, injected=nan)


def _appended() -> Iterator[ProjectionCase]:
    """Ragged rows, slots, and pages of 8 bits: by a second launch."""
    common: dict[str, Any] = {"page_size": 4, "S": 9, "head_dim": 64}
    packed: dict[str, Any] = {**common, "sequences": (3, 0, 6, 1)}
    rotated: dict[str, Any] = {"rotary": "halves", "bias": F32}
    yield case(QKV, "f16", "ragged-pages-cached-rotary", cached=True, **rotated, **packed)
    yield case(QKV, "f16", "ragged-pages-positions", positions=True, **rotated, **packed)
    gaps = {"k": OperandLayout(order="brh", gaps=(8, 16, 8)), "v": TOKENS, "q": TOKENS}
    yield case(QKV, "f16", "pages-cached", gaps, cached=True, **common)
    yield case(QKV, "f16", "slots", slots=True, positions=True, **rotated, **common)
    yield case(QKV, "f32", "slots-odd-q", {"q": ODD}, slots=True, **common)
    yield case(QKV, "f64", "ragged-pages", **packed, may_refuse=frozenset({"shared"}))
    nan = (InjectedValue("input", NAN, (0, 0, 5, 6)),)
    for stored in E4M3:
        short = "e4m3" if stored is DType.float8_e4m3fn else "e4m3fnuz"
        given: dict[str, Any] = {"dtype_pages": stored, "may_refuse": frozenset({"shared"})}
        yield case(
            QKV, "f16", f"pages-{short}-heads", scaled="heads", injected=nan, **given, **common
        )
    given = {"dtype_pages": DType.float8_e4m3fn, "may_refuse": frozenset({"shared"})}
    yield case(QKV, "f16", "pages-e4m3-no-tokens", **given, **{**common, "S": 0})
    more: dict[str, Any] = {"cached": True, "scaled": "tokens", **given}
    rows = tuple(InjectedValue("weight", NAN, (0, 0, row, 5)) for row in (4, 260))  # of q, of k
    yield case(QKV, "f16", "ragged-pages-e4m3-tokens", injected=rows, **more, **rotated, **packed)


def _output() -> Iterator[ProjectionCase]:
    token_major = {"attn_out": TOKENS}
    both: dict[str, Any] = {"bias": F16, "residual": F16}
    for kind in ("f16", "f32", "f64"):
        yield case(OUT, kind)
    yield case(OUT, "f16", "token-major", token_major)
    for kind in ("f16", "bf16", "f32"):
        more: dict[str, Any] = dict.fromkeys(("bias", "residual"), F16 if kind == "f16" else F32)
        yield case(OUT, kind, "bias-residual", **more)
        if kind != "bf16":
            yield case(OUT, kind, "token-major-bias-residual", token_major, **more)
    for dim in (33, 64, 80, 128):
        yield case(OUT, "f16", f"dim-{dim}", head_dim=dim, num_heads=3, **both)
    # Few tokens and long sums, which a kernel may split over blocks.
    few: dict[str, Any] = {"S": 9, "num_heads": 8, "head_dim": 128, "hidden": 264, **both}
    yield case(OUT, "f16", "few-tokens", **few)
    yield case(OUT, "f16", "few-tokens-token-major", token_major, **few)
    yield case(OUT, "f16", "in-place", in_place=True, **both)
    yield case(OUT, "f16", "token-major-in-place", token_major, in_place=True, **both)
    for S, hidden in ((1, 64), (65, 8), (129, 264)):
        yield case(OUT, "f16", f"ragged-{S}x{hidden}", S=S, hidden=hidden, **both)
    tight = dict.fromkeys(("attn_out", "weight", "residual", "out"), TIGHT)
    yield case(OUT, "f16", "unaligned", tight, S=7, hidden=67, head_dim=9, **both)
    gaps = {"weight": GAPS, "residual": GAPS, "out": GAPS}
    for what, order in (("head-major", "bhr"), ("token-major", "brh")):
        rows = {"attn_out": OperandLayout(order=order)}
        yield case(
            OUT,
            "f16",
            f"{what}-entries-apart",
            {"attn_out": OperandLayout(order=order, gaps=(64, 0, 0))},
            **both,
        )
        yield case(
            OUT,
            "f16",
            f"{what}-gaps",
            {**gaps, "attn_out": OperandLayout(order=order, gaps=(64, 16, 8))},
            **both,
        )
        yield case(OUT, "f16", f"{what}-out-apart", {**rows, "out": APART}, **both)
        yield case(
            OUT,
            "f16",
            f"{what}-one-residual",
            {**rows, "residual": OperandLayout(broadcast="b")},
            **both,
        )
        yield case(
            OUT,
            "f16",
            f"{what}-one-residual-row",
            {**rows, "residual": OperandLayout(broadcast="br")},
            **both,
        )
    yield case(OUT, "f16", "one-entry", batch=1, S=70, **both)
    yield case(OUT, "f16", "no-batch", batch=0, **both)
    yield case(OUT, "f16", "no-tokens", S=0, **both)
    yield case(OUT, "f16", "integers", data="integers", **both)
    yield case(OUT, "f32", "positive", data="positive", head_dim=128)
    nan = (
        InjectedValue("attn_out", NAN, (0, 1, 5, 6)),
        InjectedValue("attn_out", INF, (1, 3, 32, 31)),
    )
    yield case(OUT, "f16", "nan-in-attn-out", injected=nan, **both)
    yield case(
        OUT,
        "f16",
        "nan-in-residual",
        injected=(InjectedValue("residual", NAN, (0, 0, 5, 6)),),
        **both,
    )
