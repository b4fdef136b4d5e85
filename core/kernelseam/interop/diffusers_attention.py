"""The attention that diffusers' dispatcher calls. Imports torch."""

from __future__ import annotations

from typing import Any

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_sdpa import scaled_dot_product_attention

Tensor = Any


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **options: Any,
) -> Tensor:
    """What diffusers' backend "native" computes, by ours, with gradients.

    query [B, S_q, H, D], key [B, S_k, H_kv, D], value [B, S_k, H_kv, D_v] → [B, S_q, H, D_v].
    ``attn_mask`` as torch's scaled_dot_product_attention has it, or [B, S_k]: of bool, True where a
    key takes part, or added to the scores. Raises InvalidValue for dropout, for diffusers' context
    parallelism, and for other ``options``, which are a model's ``attention_kwargs``.
    """
    if _parallel_config is not None:
        raise InvalidValue(
            "_parallel_config",
            type(_parallel_config).__name__,
            "context parallelism is diffusers' own, for its backends",
            'Choose one of them: model.set_attention_backend("native")',
        )
    for name, given in options.items():
        if given is not None:
            raise InvalidValue(
                name,
                given,
                "is not an option of this attention",
                "Leave it out of attention_kwargs",
            )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.permute(0, 2, 1, 3) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.permute(0, 2, 1, 3)
