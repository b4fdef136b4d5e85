"""Attention's results and gradients on torch tensors that have memory, without torch's graph: what
the autograd functions and the operators share. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import with_rows
from kernelseam.interop.torch_library.dtypes import torch_dtype
from kernelseam.ops.attention import attention, attention_varlen
from kernelseam.ops.attention_bwd import AttentionGradients, attention_bwd

Tensor = Any
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k")
"""Those of packed q, k and v."""


def forward(
    operands: Mapping[str, Tensor], options: Mapping[str, Any], fills_lse: bool = True
) -> Any:
    """The result, or (result, lse) where the options ask for it. Rows of no sequence are 0, and in
    the LSE −inf: where ``fills_lse``, as gradients do not read them."""
    if "cu_seqlens_q" not in operands:
        return attention(**operands, **options)
    q, v = operands["q"], operands["v"]
    given = {**options, **operands}
    if "out" not in operands and v.ndim and all(map(_is_dense, (q, v))):
        dtype = torch_dtype(given.pop("out_dtype", None))
        if dtype is None:
            dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
        given["out"] = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    try:
        result = attention_varlen(**given)  # refuses those without an out
    except InvalidValue as e:
        if e.field != "out" or "out" in operands:
            raise
        raise InvalidValue(
            "out_dtype", options["out_dtype"], e.rule, "Name another, or leave it out"
        ) from None
    if fills_lse and given.get("return_lse"):
        lse = result[1]
        lse.masked_fill_(rows_beyond(lse.shape[1], operands["cu_seqlens_q"]), -torch.inf)
    return result


def _is_dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and not x.is_quantized


def gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    operands: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    bias_gradient: bool,
    sink_gradient: bool,
    implementation: str | None = None,
    **options: Any,
) -> AttentionGradients[Tensor]:
    """Gradients by q, k, v and what else is asked for, given those of the result and of its LSE, of
    which one may be None.

    The LSE's are those of an attention whose values are 0: a pass of its own, by whichever
    implementation is cheapest.
    """
    given = dict(operands)
    if bias_gradient and "bias" in given:
        given["bias"] = _apart(given["bias"])
    asked = {"bias_gradient": bias_gradient, "sink_gradient": sink_gradient, **options}
    parts = []
    if dout is not None:
        kind = given["q"].dtype
        if dout.dtype is not kind:
            dout = dout.to(kind)
        result = out if out.dtype is kind else out.to(kind)
        parts.append(
            attention_bwd(
                with_rows(dout),
                **given,
                out=result,
                lse=lse,
                implementation=implementation,
                **asked,
            )
        )
    if dlse is not None:
        parts.append(_of_lse(dlse, given, out, lse, asked))
    result = parts[0] if len(parts) == 1 else AttentionGradients(*map(_sum, *parts))
    if "cu_seqlens_q" in given:
        _clear_beyond(result, given)
    return result


def gradients_ahead(
    operands: Mapping[str, Tensor], options: Mapping[str, Any], bwd_options: Mapping[str, Any]
) -> Callable[[], None]:
    """What compiles the gradients of a dense call: the forward's options, and the gradients'."""
    if operands.keys() != {"q", "k", "v"}:
        return lambda: None
    from kernelseam.ops.gradients_ahead import gradients_ahead

    chosen = bwd_options["deterministic"], bwd_options["implementation"]
    return gradients_ahead(operands, options, *chosen)


def _clear_beyond(result: AttentionGradients[Tensor], operands: Mapping[str, Tensor]) -> None:
    """Set rows of no sequence to 0."""
    known: dict[tuple[int, int], Tensor] = {}
    for gradient, name in zip(result, _OFFSETS, strict=False):
        if (offsets := operands.get(name)) is None:
            continue
        key = offsets.data_ptr(), gradient.shape[0]
        if key not in known:
            known[key] = rows_beyond(key[1], offsets).view(-1, 1, 1)
        gradient.masked_fill_(known[key], 0)


def _of_lse(
    dlse: Tensor,
    operands: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    options: Mapping[str, Any],
) -> AttentionGradients[Tensor]:
    """Gradients of the LSE alone. The gradient of a score is p·(dp − delta), delta = Σ dout·out.
    That of the LSE is p·dlse: dp is 0 where v is, and delta is −dlse where out is 1 and dout is
    −dlse, in two parts where its dtype has fewer bits."""
    q, v = operands["q"], operands["v"]
    if options.get("layout", "bhsd") == "bshd" or "cu_seqlens_q" in operands:
        dlse = dlse.transpose(-1, -2)
    wide = 8  # columns: 16 bytes of halves
    values = v.new_zeros((*v.shape[:-1], wide))
    ones = out.new_zeros((*out.shape[:-1], wide), dtype=q.dtype)
    ones[..., :2] = 1
    high = -dlse.to(q.dtype)
    low = (-dlse - high).to(q.dtype)
    rows = torch.nn.functional.pad(torch.stack((high, low), -1), (0, wide - 2))
    result = attention_bwd(rows, **{**operands, "v": values}, out=ones, lse=lse, **options)
    return result._replace(dv=torch.zeros_like(v, memory_format=torch.contiguous_format))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def _apart(bias: Tensor) -> Tensor:
    """A bias each of whose elements has a gradient of its own: that of a stride of 0 would be their
    sum."""
    expanded = any(n > 1 and s == 0 for n, s in zip(bias.shape, bias.stride(), strict=True))
    return bias.contiguous() if expanded else bias


def rows_beyond(rows: int, offsets: Tensor) -> Tensor:
    """[rows]: which lie before the first sequence or after the last, and are not written. Nothing
    waits for it."""
    row = torch.arange(rows, device=offsets.device)
    return (row < offsets[0]) | (row >= offsets[-1])
