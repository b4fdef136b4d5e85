"""Attention that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at
its first use."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.descriptors.common.validation import flag
from kernelseam.interop.torch_function import (
    Gradients,
    check_bwd_implementation,
    differentiable_once,
    tensors,
    wanted,
    with_rows,
)
from kernelseam.ops.attention import attention as attention_forward
from kernelseam.ops.attention import attention_varlen as varlen_forward
from kernelseam.ops.attention_bwd import attention_bwd

Tensor = Any
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    layout: str = "bhsd",
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.attention`` on torch tensors, with gradients to q, k, v, ``bias`` and ``sinks``.

    ``deterministic=False`` allows gradients whose order of summation varies, where that is faster.
    ``implementation`` names a way of the forward, ``bwd_implementation`` one of the gradients. Both
    run on torch's current stream. All else is as there, shapes and dtypes too. A bias that repeats
    because it has extent 1, or lacks an axis, takes the sum over what it repeats along; one that is
    expanded takes a gradient of its whole shape, which torch sums.

    Gradients are differentiable once: under ``create_graph`` a second derivative raises
    InvalidValue. Where none are wanted, nothing is kept for them.
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "prefix_lengths": prefix_lengths,
        "kv_lengths": kv_lengths,
    }
    options = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "layout": layout,
        "backend": backend,
    }
    return _apply(
        given, ("q", "k", "v"), options, implementation, deterministic, bwd_implementation
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
) -> Tensor:
    """``kernelseam.attention_varlen`` on torch tensors, with gradients to q, k, v, ``bias`` and
    ``sinks``; see ``attention``.

    Rows that belong to no sequence are 0, in the result and in the gradients.
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "prefix_lengths": prefix_lengths,
    }
    options = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "backend": backend,
    }
    needed = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    return _apply(given, needed, options, implementation, deterministic, bwd_implementation)


def _apply(
    given: dict[str, Tensor | None],
    needed: tuple[str, ...],
    options: dict[str, Any],
    implementation: str | None,
    deterministic: bool,
    bwd_implementation: str | None,
) -> Tensor:
    operands = tensors(given, needed)
    deterministic = flag("deterministic", deterministic)
    check_bwd_implementation(bwd_implementation, "attention_bwd", "q", operands)
    forward = {**options, "implementation": implementation}
    if not wanted(operands, DIFFERENTIABLE):
        return _forward(operands, forward, return_lse=False)
    backward = {**options, "deterministic": deterministic, "implementation": bwd_implementation}
    return _Attention.apply(tuple(operands), forward, backward, *operands.values())


def _forward(operands: dict[str, Tensor], options: dict[str, Any], *, return_lse: bool) -> Any:
    if "cu_seqlens_q" not in operands:
        return attention_forward(**operands, **options, return_lse=return_lse)
    q, v = operands["q"], operands["v"]
    out = None
    if v.ndim and not any(
        x.layout is not torch.strided or x.is_nested or x.is_quantized for x in (q, v)
    ):
        out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    # refuses those without an out
    return varlen_forward(**operands, **options, out=out, return_lse=return_lse)


@differentiable_once("attention")
def _gradients(ctx: Any, dout: Tensor) -> Gradients:
    *operands, out, lse = ctx.saved_tensors
    given = dict(zip(ctx.names, operands, strict=True))
    asked = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    if "bias" in asked:
        given["bias"] = _apart(given["bias"])
    made = attention_bwd(
        with_rows(dout),
        **given,
        out=out,
        lse=lse,
        bias_gradient="bias" in asked,
        sink_gradient="sinks" in asked,
        **ctx.options,
    )
    found = {name: getattr(made, f"d{name}") for name in asked}
    for name, offsets in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
        if name in found and offsets in given:
            _clear_beyond(found[name], given[offsets])
    return (None, None, None, *(found.get(name) for name in ctx.names))


def _apart(bias: Tensor) -> Tensor:
    """A bias each of whose elements has a gradient of its own: that of a stride of 0 would be their
    sum."""
    expanded = any(n > 1 and s == 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    return bias.contiguous() if expanded else bias


def _clear_beyond(gradient: Tensor, offsets: Tensor) -> None:
    """Zeros for rows before the first sequence and after the last, which are not written; nothing
    waits for it."""
    row = torch.arange(len(gradient), device=gradient.device)
    gradient.masked_fill_(((row < offsets[0]) | (row >= offsets[-1]))[:, None, None], 0)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name; options of the forward and of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        bwd_options: dict[str, Any],
        *tensors: Tensor,
    ) -> Tensor:
        out, lse = _forward(dict(zip(names, tensors, strict=True)), options, return_lse=True)
        ctx.names, ctx.options = names, bwd_options
        ctx.save_for_backward(*tensors, out, lse)
        return out

    backward = staticmethod(_gradients)
