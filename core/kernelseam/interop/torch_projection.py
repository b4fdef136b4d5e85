"""Projections that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this
at its first use."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import (
    Gradients,
    check_bwd_implementation,
    differentiable_once,
    tensors,
    wanted,
    with_rows,
)
from kernelseam.ops import projection, projection_bwd

Tensor = Any


def fused_qkv_projection(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    layout: str = "bhsd",
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_style: str = "halves",
    positions: Tensor | None = None,
    first_position: int = 0,
    k_pages: Tensor | None = None,
    v_pages: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_layout: str = "nhd",
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Any:
    """``kernelseam.fused_qkv_projection`` on torch tensors, with gradients to input, weight and
    bias.

    ``implementation`` names a way of the forward, ``bwd_implementation`` one of the gradients; both
    run on torch's current stream. Gradients by rotated q and k are turned back by torch first, in
    float32 (float64 of float64), and rounded to the tensors' dtype before they are multiplied. None
    flow to cosines, sines and pages: where gradients are wanted, k and v can not be written into
    pages. What no gradient needs is not kept. All else is as there.

    Gradients are differentiable once: under ``create_graph`` a second derivative raises
    InvalidValue.
    """
    given = {
        "input": input,
        "weight": weight,
        "bias": bias,
        **_tables(rotary),
        "positions": positions,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": block_table,
    }
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layout": layout,
        "rotary_style": rotary_style,
        "first_position": first_position,
        "kv_layout": kv_layout,
        "backend": backend,
        "implementation": implementation,
    }
    operands = tensors(
        given, ("input", "weight", *_ROTARY) if rotary is not None else ("input", "weight")
    )
    check_bwd_implementation(bwd_implementation, "qkv_projection_bwd", "input", operands)
    asked = wanted(operands, ("input", "weight", "bias"))
    if not asked:
        return _qkv_forward(operands, options)
    if k_pages is not None or v_pages is not None:
        raise InvalidValue(
            "k_pages",
            "given",
            f"gradients to {', '.join(asked)} do not flow through pages",
            "Call under torch.no_grad(), or leave the pages out",
        )
    return _Qkv.apply(tuple(operands), options, bwd_implementation, *operands.values())


def fused_output_projection_residual(
    attn_out: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    layout: str = "bhsd",
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.fused_output_projection_residual`` on torch tensors, with gradients to all of
    them.

    The residual's is that of the result, not copied. All else is as there and in
    ``fused_qkv_projection``.
    """
    given = {"attn_out": attn_out, "weight": weight, "bias": bias, "residual": residual}
    options: dict[str, Any] = {
        "layout": layout,
        "backend": backend,
        "implementation": implementation,
    }
    operands = tensors(given, ("attn_out", "weight"))
    check_bwd_implementation(bwd_implementation, "output_projection_bwd", "attn_out", operands)
    if not wanted(operands, tuple(given)):
        return projection.fused_output_projection_residual(**operands, **options)
    return _Output.apply(tuple(operands), options, bwd_implementation, *operands.values())


_ROTARY = ("rotary[0]", "rotary[1]")
"""Cosines and sines, as the caller knows them."""


def _tables(rotary: Any) -> dict[str, Tensor | None]:
    """Cosines and sines by the names that a refusal shows."""
    if rotary is None:
        return {}
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise InvalidValue(
            "rotary", type(rotary).__name__, "must be (cosines, sines)", "Pass two tensors"
        )
    return dict(zip(_ROTARY, rotary, strict=True))


def _qkv_forward(operands: dict[str, Tensor], options: dict[str, Any]) -> Any:
    given = dict(operands)
    if _ROTARY[0] in given:
        given["rotary"] = tuple(given.pop(name) for name in _ROTARY)
    return projection.fused_qkv_projection(**given, **options)


@differentiable_once("fused_qkv_projection")
def _qkv_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
    if _ROTARY[0] in saved:
        dq, dk = (_turned_back(x, saved, ctx.options) for x in (dq, dk))
    dq, dk, dv = (with_rows(x) for x in (dq, dk, dv))
    asked = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    heads = -3 if ctx.options["layout"] == "bhsd" else -2
    made = projection_bwd.fused_qkv_projection_bwd(
        dq,
        dk,
        dv,
        saved.get("input"),
        saved.get("weight"),
        "bias" in asked,
        dq.shape[heads],
        dk.shape[heads],
        dq.shape[-1],
        layout=ctx.options["layout"],
        input_gradient="input" in asked,
        weight_gradient="weight" in asked,
        bias_dtype=ctx.bias_dtype if "bias" in asked else None,
        backend=ctx.options["backend"],
        implementation=ctx.bwd_implementation,
    )
    found = {"input": made.d_input, "weight": made.d_weight, "bias": made.d_bias}
    return (None, None, None, *(found.get(n) for n in ctx.names))


def _turned_back(x: Tensor, saved: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """The gradient by what was turned → that by what it was before: turned by the opposite
    angle."""
    cos, sin = (saved[name] for name in _ROTARY)
    half, tokens = cos.shape[-1], -2 if options["layout"] == "bhsd" else -3
    if "positions" in saved:
        cos, sin = (table[saved["positions"].long()] for table in (cos, sin))
    else:
        at = slice(options["first_position"], options["first_position"] + x.shape[tokens])
        cos, sin = cos[at], sin[at]
    cos, sin = (table.unsqueeze(-3 if options["layout"] == "bhsd" else -2) for table in (cos, sin))
    pairs = options["rotary_style"] == "pairs"
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if pairs
        else (slice(0, half), slice(half, 2 * half))
    )
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    found[..., 2 * half :] = x[..., 2 * half :]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    a, b = x[..., first].to(kind), x[..., second].to(kind)
    found[..., first] = a * cos + b * sin
    found[..., second] = b * cos - a * sin
    return found


class _Qkv(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name; options of the forward; the gradients' implementation."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        bwd_implementation: str | None,
        *operands: Tensor,
    ) -> Any:
        given = dict(zip(names, operands, strict=True))
        asked = {n for n, w in zip(names, ctx.needs_input_grad[3:], strict=True) if w}
        needed = {"input": "weight" in asked, "weight": "input" in asked, "bias": False}
        ctx.kept = tuple(n for n in names if needed.get(n, True))
        ctx.names, ctx.options, ctx.bwd_implementation = names, options, bwd_implementation
        ctx.bias_dtype = given["bias"].dtype if "bias" in given else None
        ctx.save_for_backward(*(given[n] for n in ctx.kept))
        return _qkv_forward(given, options)

    backward = staticmethod(_qkv_gradients)


@differentiable_once("fused_output_projection_residual")
def _output_gradients(ctx: Any, d_output: Tensor) -> Gradients:
    asked = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    found: dict[str, Tensor | None] = {}
    if "residual" in asked:
        found["residual"] = d_output.to(ctx.dtypes["residual"])
    if asked - {"residual"}:
        saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        made = projection_bwd.fused_output_projection_residual_bwd(
            with_rows(d_output),
            saved["attn_out"],
            saved.get("weight"),
            "bias" in asked,
            layout=ctx.options["layout"],
            input_gradient="attn_out" in asked,
            weight_gradient="weight" in asked,
            bias_dtype=ctx.dtypes["bias"] if "bias" in asked else None,
            backend=ctx.options["backend"],
            implementation=ctx.bwd_implementation,
        )
        found |= {"attn_out": made.d_attn_out, "weight": made.d_weight, "bias": made.d_bias}
    return (None, None, None, *(found.get(n) for n in ctx.names))


class _Output(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name; options of the forward; the gradients' implementation."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        bwd_implementation: str | None,
        *operands: Tensor,
    ) -> Tensor:
        given = dict(zip(names, operands, strict=True))
        asked = {n for n, w in zip(names, ctx.needs_input_grad[3:], strict=True) if w}
        needed = {"attn_out": asked != {"residual"}, "weight": "attn_out" in asked}
        ctx.kept = tuple(n for n in names if needed.get(n, False))
        ctx.names, ctx.options, ctx.bwd_implementation = names, options, bwd_implementation
        ctx.dtypes = {n: x.dtype for n, x in given.items()}
        ctx.save_for_backward(*(given[n] for n in ctx.kept))
        return projection.fused_output_projection_residual(**given, **options)

    backward = staticmethod(_output_gradients)
