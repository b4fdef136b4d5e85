"""Projections that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this
at its first use."""

from __future__ import annotations

from typing import Any, Unpack, overload

import torch
from torch import Tensor

from kernelseam.descriptors.projection.append import check_unpaged
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    tensors,
    wanted,
    with_rows,
)
from kernelseam.interop.torch_library import projection as operators
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_rotary import inverse_rotations
from kernelseam.ops import projection, projection_bwd
from kernelseam.ops.signatures import QkvTensors


@overload
def fused_qkv_projection(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    k_pages: None = None,
    v_pages: None = None,
    **options: Unpack[QkvTensors],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def fused_qkv_projection(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    *,
    k_pages: Tensor,
    v_pages: Tensor,
    **options: Unpack[QkvTensors],
) -> Tensor: ...


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
    slot_mapping: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    kv_layout: str = "nhd",
    out_dtype: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``kernelseam.fused_qkv_projection`` on torch tensors, with gradients to input, weight and
    bias.

    ``implementation`` selects one of the forward, ``bwd_implementation`` one of the gradients; both
    run on torch's current stream. torch first undoes the rotation of gradients by q and k, in
    float32 (float64 of float64), and rounded to the tensors' dtype before they are multiplied. None
    flow to cosines, sines and pages: where gradients are wanted, k and v can not be written into
    pages. What no gradient needs is not kept. All else is as there.

    ``out_dtype`` may be torch's. Under torch.autocast input and weight are converted to its dtype.
    Where torch compiles, exports or transforms the caller, ``torch.ops.kernelseam`` is called.

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
        "slot_mapping": slot_mapping,
        "kv_lengths": kv_lengths,
        "cu_seqlens_q": cu_seqlens_q,
        "k_scales": k_scales,
        "v_scales": v_scales,
    }
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layout": layout,
        "rotary_style": rotary_style,
        "first_position": first_position,
        "kv_layout": kv_layout,
        "out_dtype": dtype_name(out_dtype),
        "backend": backend,
        "implementation": implementation,
    }
    operands, traced = tensors(
        given, ("input", "weight", *_ROTARY) if rotary is not None else ("input", "weight")
    )
    operands = autocast(operands, ("input", "weight"))
    asked = wanted(operands, ("input", "weight", "bias"))
    paged = any(x is not None for x in (k_pages, v_pages, block_table, slot_mapping))
    if asked and paged:
        raise InvalidValue(
            "k_pages",
            "given",
            f"gradients to {', '.join(asked)} do not flow through pages",
            "Call under torch.no_grad(), or leave the pages out",
        )
    if paged and bwd_implementation is not None:
        raise InvalidValue(
            "bwd_implementation",
            bwd_implementation,
            "gradients do not flow through pages",
            "Leave it out, or leave the pages out",
        )
    if traced and not paged:
        check_unpaged({n: given[n] for n in _APPENDED})
        return _traced_qkv(operands, options, bwd_implementation)
    if not traced:
        check_bwd_implementation(bwd_implementation, "qkv_projection_bwd", "input", operands)
    if not asked:
        return _qkv_forward(operands, options)
    return _Qkv.apply(tuple(operands), options, bwd_implementation, *operands.values())


def fused_output_projection_residual(
    attn_out: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    layout: str = "bhsd",
    out_dtype: Any = None,
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
        "out_dtype": dtype_name(out_dtype),
        "backend": backend,
        "implementation": implementation,
    }
    operands, traced = tensors(given, ("attn_out", "weight"))
    operands = autocast(operands, ("attn_out", "weight"))
    if traced:
        return operators.FUSED_OUTPUT(
            *[operands.get(n) for n in operators.OUTPUT],
            **options,
            bwd_implementation=bwd_implementation,
        )
    check_bwd_implementation(bwd_implementation, "output_projection_bwd", "attn_out", operands)
    if not wanted(operands, tuple(given)):
        return projection.fused_output_projection_residual(**operands, **options)
    return _Output.apply(tuple(operands), options, bwd_implementation, *operands.values())


_APPENDED = ("kv_lengths", "cu_seqlens_q", "k_scales", "v_scales")
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


def _traced_qkv(
    operands: dict[str, Tensor], options: dict[str, Any], bwd_implementation: str | None
) -> Any:
    """By the operator that torch knows."""
    named = {"cos": _ROTARY[0], "sin": _ROTARY[1]}
    return operators.FUSED_QKV(
        *[operands.get(named.get(n, n)) for n in operators.OPERANDS],
        **options,
        bwd_implementation=bwd_implementation,
    )


def _qkv_forward(operands: dict[str, Tensor], options: dict[str, Any]) -> Any:
    given = dict(operands)
    if _ROTARY[0] in given:
        given["rotary"] = tuple(given.pop(name) for name in _ROTARY)
    return projection.fused_qkv_projection(**given, **options)


@differentiable_once("fused_qkv_projection")
def _qkv_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
    dq, dk, dv = (x.to(ctx.dtype) for x in (dq, dk, dv))
    if _ROTARY[0] in saved:
        cos, sin = (saved[n] for n in _ROTARY)
        positions = saved.get("positions")
        dq, dk = inverse_rotations(dq, dk, cos, sin, positions, ctx.options)
    dq, dk, dv = (with_rows(x) for x in (dq, dk, dv))
    asked = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    heads = -3 if ctx.options["layout"] == "bhsd" else -2
    gradients = projection_bwd.fused_qkv_projection_bwd(
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
    result = {"input": gradients.d_input, "weight": gradients.d_weight, "bias": gradients.d_bias}
    return (None, None, None, *(result.get(n) for n in ctx.names))


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
        ctx.dtype = given["input"].dtype
        ctx.bias_dtype = given["bias"].dtype if "bias" in given else None
        ctx.save_for_backward(*(given[n] for n in ctx.kept))
        return _qkv_forward(given, options)

    backward = staticmethod(_qkv_gradients)


@differentiable_once("fused_output_projection_residual")
def _output_gradients(ctx: Any, d_output: Tensor) -> Gradients:
    asked = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    result: dict[str, Tensor | None] = {}
    if "residual" in asked:
        result["residual"] = d_output.to(ctx.dtypes["residual"])
    if asked - {"residual"}:
        saved = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        gradients = projection_bwd.fused_output_projection_residual_bwd(
            with_rows(d_output.to(ctx.dtypes["attn_out"])),
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
        result |= {
            "attn_out": gradients.d_attn_out,
            "weight": gradients.d_weight,
            "bias": gradients.d_bias,
        }
    return (None, None, None, *(result.get(n) for n in ctx.names))


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
