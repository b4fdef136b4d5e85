"""Projections that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this
at its first use."""

from __future__ import annotations

from typing import Any, Unpack, overload

from torch import Tensor

from kernelseam.descriptors.projection.append import check_unpaged
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import (
    autocast,
    check_bwd_implementation,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library import projection as operators
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.ops import projection
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
    if (traced or asked) and not paged:
        check_unpaged({n: given[n] for n in _APPENDED})
    if not traced:
        check_bwd_implementation(bwd_implementation, "qkv_projection_bwd", "input", operands)
    if paged or not (traced or asked):
        if rotary is not None:
            operands["rotary"] = tuple(map(operands.pop, _ROTARY))
        return projection.fused_qkv_projection(**operands, **options)
    whole = [operands.get(_CALLED.get(n, n)) for n in operators.QKV]
    options["bwd_implementation"] = bwd_implementation
    if traced:
        return operators.FUSED_QKV(*whole, **options)
    return operators.QKV_DIFFERENTIATED(options, *whole)


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
    whole, ways = map(operands.get, operators.OUTPUT), {"bwd_implementation": bwd_implementation}
    if traced:
        return operators.FUSED_OUTPUT(*whole, **options, **ways)
    check_bwd_implementation(bwd_implementation, "output_projection_bwd", "attn_out", operands)
    if not wanted(operands, tuple(given)):
        return projection.fused_output_projection_residual(**operands, **options)
    return operators.OUTPUT_DIFFERENTIATED({**options, **ways}, *whole)


_APPENDED = ("kv_lengths", "cu_seqlens_q", "k_scales", "v_scales")
_ROTARY = ("rotary[0]", "rotary[1]")
"""Cosines and sines, as the caller knows them."""
_CALLED = dict(zip(("cos", "sin"), _ROTARY, strict=True))


def _tables(rotary: Any) -> dict[str, Tensor | None]:
    """Cosines and sines by the names that a refusal shows."""
    if rotary is None:
        return {}
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        raise InvalidValue(
            "rotary", type(rotary).__name__, "must be (cosines, sines)", "Pass two tensors"
        )
    return dict(zip(_ROTARY, rotary, strict=True))
