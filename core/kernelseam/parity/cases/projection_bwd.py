"""The rows of the parity matrix about the projections' gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kernelseam.parity.cases.projection import APART, F16, F32, GAPS, TIGHT, grouped
from kernelseam.samples.common import INF, NAN, SHORT, TOKENS, InjectedValue
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.projection_case import ProjectionCase, case

QKV, OUT = "qkv_projection_bwd", "output_projection_bwd"


def projection_bwd_cases() -> list[ProjectionCase]:
    return grouped(
        {
            "gradients: projection to q, k and v": _qkv(),
            "gradients: projection of an attention's result": _output(),
        }
    )


def of_gradients(operand_layout: OperandLayout) -> dict[str, OperandLayout]:
    """The same layout for dq, dk and dv."""
    return dict.fromkeys(("dq", "dk", "dv"), operand_layout)


def _both(
    operation: str, tokens: Mapping[str, OperandLayout], rows: str
) -> Iterator[ProjectionCase]:
    """Cases that both operations have. ``tokens``: token-major layouts of the operands with heads;
    ``rows``: the name of the [batch, row, column] operand."""
    for kind in SHORT:
        bias = SHORT[kind] if kind == "f64" else F32
        yield case(operation, kind, "bias", bias=bias)
    yield case(operation, "f16")
    yield case(operation, "f16", "token-major", tokens)
    yield case(operation, "f16", "token-major-bias", tokens, bias=F16)
    for gradient in ("d_input", "d_weight"):
        yield case(operation, "f16", f"{gradient.replace('_', '-')}-alone", gradients=(gradient,))
    yield case(operation, "f16", "d-bias-alone", gradients=(), bias=F32)
    yield case(operation, "f16", "d-bias-alone-token-major", tokens, gradients=(), bias=F32)
    for heads, kv_heads, dim in ((3, 3, 64), (8, 1, 80), (2, 1, 128), (5, 2, 33)):
        what = f"heads-{heads}-{kv_heads}-{dim}"
        yield case(
            operation, "f16", what, num_heads=heads, kv_heads=kv_heads, head_dim=dim, bias=F32
        )
        if dim % 8 == 0:
            yield case(
                operation,
                "f16",
                f"{what}-token-major",
                tokens,
                num_heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                bias=F32,
            )
    for S, hidden in ((1, 64), (65, 8), (129, 264)):
        yield case(operation, "f16", f"ragged-{S}x{hidden}", S=S, hidden=hidden, bias=F32)
    yield case(operation, "f16", "one-entry", tokens, batch=1, S=70, bias=F32)
    yield case(operation, "f16", "entries-apart", {**tokens, rows: APART}, bias=F32)
    yield case(operation, "f16", "integers", data="integers", bias=F32, S=40)
    yield case(operation, "f16", "no-hidden", hidden=0, bias=F32)
    # Heads of whole panels, which a kernel may take as one axis, and more than one tile of each.
    whole: dict[str, Any] = {"num_heads": 4, "kv_heads": 2, "bias": F32}
    for dim, batch, S in ((64, 3, 100), (128, 1, 200), (64, 2, 64)):
        what = f"tiles-{dim}-{batch}x{S}"
        yield case(operation, "f16", what, head_dim=dim, batch=batch, S=S, hidden=264, **whole)
    nothing: dict[str, dict[str, Any]] = {"no-batch": {"batch": 0}, "no-tokens": {"S": 0}}
    for what, extents in nothing.items():
        yield case(operation, "f16", what, bias=F32, **extents)
        yield case(operation, "f16", f"{what}-token-major", tokens, bias=F32, **extents)
    yield case(operation, "f32", "positive", data="positive", S=600, bias=F32)


def _qkv() -> Iterator[ProjectionCase]:
    yield from _both(QKV, of_gradients(TOKENS), "input")
    for kind in ("f16", "f32"):
        yield case(QKV, kind, "packed", packed=True, bias=F32)
    operand_layouts = {
        **of_gradients(GAPS),
        **dict.fromkeys(("input", "weight", "d_input", "d_weight"), GAPS),
    }
    yield case(QKV, "f16", "gaps", operand_layouts, bias=F32)
    # So many small parts of d_weight that a block computes several.
    yield case(
        QKV,
        "f16",
        "heads-160-80-8",
        num_heads=160,
        kv_heads=80,
        head_dim=8,
        S=5,
        hidden=13,
        bias=F32,
    )
    yield case(
        QKV, "f16", "different-orders", {"dq": TOKENS, "dk": GAPS, "d_input": APART}, bias=F32
    )
    yield case(
        QKV,
        "f16",
        "q-alone-side-by-side",
        {"dq": TOKENS, "dv": OperandLayout(order="brh", gaps=(0, 8, 0))},
        bias=F32,
    )
    tight = {
        **of_gradients(TIGHT),
        **dict.fromkeys(("input", "weight", "d_input", "d_weight"), TIGHT),
    }
    yield case(QKV, "f16", "unaligned", tight, S=7, hidden=67, head_dim=9, bias=F32)
    nan = (
        InjectedValue("dq", NAN, (0, 1, 5, 6)),
        InjectedValue("dv", INF, (1, 1, 32, 31)),
        InjectedValue("input", NAN, (1, 0, 3, 4)),
    )
    for kind in ("f16", "f32"):
        yield case(QKV, kind, "nan", injected=nan, bias=F32)


def _output() -> Iterator[ProjectionCase]:
    tokens = {"attn_out": TOKENS, "d_attn_out": TOKENS}
    yield from _both(OUT, tokens, "d_output")
    for name in tokens:
        yield case(OUT, "f16", f"{name.replace('_', '-')}-token-major", {name: TOKENS}, bias=F32)
    rows = dict.fromkeys(("d_output", "weight", "d_weight"), GAPS)
    for what, order in (("head-major", "bhr"), ("token-major", "brh")):
        heads = OperandLayout(order=order, gaps=(64, 24, 8))
        yield case(
            OUT, "f16", f"{what}-gaps", {**rows, "attn_out": heads, "d_attn_out": heads}, bias=F32
        )
    tight = dict.fromkeys(("d_output", "attn_out", "weight", "d_attn_out", "d_weight"), TIGHT)
    yield case(OUT, "f16", "unaligned", tight, S=7, hidden=67, head_dim=9, bias=F32)
    yield case(OUT, "f16", "one-d-output", {"d_output": OperandLayout(broadcast="br")}, bias=F32)
    nan = (
        InjectedValue("d_output", NAN, (0, 0, 5, 6)),
        InjectedValue("attn_out", INF, (1, 1, 32, 31)),
    )
    for kind in ("f16", "f32"):
        yield case(OUT, kind, "nan", injected=nan, bias=F32)
