"""Attention that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at its first use."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernelseam.errors import InvalidValue
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

    ``deterministic=False`` allows gradients whose order of summation varies, where that is faster. ``implementation``
    names a way of the forward, ``bwd_implementation`` one of the gradients. Both run on torch's current stream. All
    else is as there, shapes and dtypes too; the gradient of a bias that repeats is summed over what it repeats along.

    Gradients are differentiable once. Where none are wanted, nothing is kept for them.
    """
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "prefix_lengths": prefix_lengths, "kv_lengths": kv_lengths,
    }
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "layout": layout,
               "backend": backend}
    return _apply(given, options, implementation, deterministic, bwd_implementation)


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
    """``kernelseam.attention_varlen`` on torch tensors, with gradients to q, k, v, ``bias`` and ``sinks``; see
    ``attention``.

    Rows that belong to no sequence are 0, in the result and in the gradients.
    """
    given = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "bias": bias, "mask": mask,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "prefix_lengths": prefix_lengths,
    }
    options = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k, "backend": backend,
    }
    return _apply(given, options, implementation, deterministic, bwd_implementation)


def _apply(
    given: dict[str, Tensor | None], options: dict[str, Any], implementation: str | None, deterministic: bool,
    bwd_implementation: str | None,
) -> Tensor:
    tensors: dict[str, Tensor] = {n: x for n, x in given.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise InvalidValue(name, type(x).__name__, "must be a torch tensor", "Pass torch.as_tensor(…)")
    wanted = [n for n, x in tensors.items() if x.requires_grad and torch.is_grad_enabled()]
    if not wanted:
        return _forward(tensors, {**options, "implementation": implementation}, return_lse=False)
    for name in wanted:
        if name not in DIFFERENTIABLE:
            raise InvalidValue(f"{name}.requires_grad", True, "gradients do not flow to it", "Pass tensor.detach()")
    if "bias" in tensors:
        tensors["bias"] = _once(tensors["bias"])
    return _Attention.apply(
        tuple(tensors), {**options, "implementation": implementation},
        {**options, "deterministic": deterministic, "implementation": bwd_implementation}, *tensors.values(),
    )


def _once(bias: Tensor) -> Tensor:
    """A bias with extent 1 where it is expanded: its gradient is summed there, as torch's own would be in the end."""
    for axis, (extent, stride) in enumerate(zip(bias.shape, bias.stride(), strict=True)):
        if extent > 1 and stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias


def _forward(tensors: dict[str, Tensor], options: dict[str, Any], *, return_lse: bool) -> Any:
    if "cu_seqlens_q" not in tensors:
        return attention_forward(**tensors, **options, return_lse=return_lse)
    q, v = tensors["q"], tensors["v"]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    return varlen_forward(**tensors, **options, out=out, return_lse=return_lse)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    given = dict(zip(ctx.names, tensors, strict=True))
    wanted = {n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w}
    if dout.shape[-1] > 1 and dout.stride(-1) != 1:  # as that of sum() is, which repeats one number
        dout = dout.contiguous()
    made = attention_bwd(
        dout, **given, out=out, lse=lse, bias_gradient="bias" in wanted, sink_gradient="sinks" in wanted,
        **ctx.options,
    )
    found = {name: getattr(made, f"d{name}") for name in wanted}
    for name, offsets in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
        if name in found and offsets in given:
            _clear_beyond(found[name], given[offsets])
    return (None, None, None, *(found.get(name) for name in ctx.names))


def _clear_beyond(gradient: Tensor, offsets: Tensor) -> None:
    """Zeros for rows before the first sequence and after the last, which are not written; nothing waits for it."""
    row = torch.arange(len(gradient), device=gradient.device)
    gradient.masked_fill_(((row < offsets[0]) | (row >= offsets[-1]))[:, None, None], 0)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name; options of the forward and of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, names: tuple[str, ...], options: dict[str, Any], bwd_options: dict[str, Any], *tensors: Tensor
    ) -> Tensor:
        out, lse = _forward(dict(zip(names, tensors, strict=True)), options, return_lse=True)
        ctx.names, ctx.options = names, bwd_options
        ctx.save_for_backward(*tensors, out, lse)
        return out

    backward = staticmethod(once_differentiable(_gradients))
