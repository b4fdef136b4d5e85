"""Attention as Transformers' models call it, by ours. Imports torch; Transformers is not needed."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import is_block_mask
from kernelseam.interop.torch_autograd import attention
from kernelseam.interop.torch_function import with_rows
from kernelseam.interop.transformers_options import (
    OF_THE_MODEL,
    check_mask,
    packed_rows,
    refuse,
    selection,
    sinks_of,
)
from kernelseam.interop.transformers_padding import padding_of, sequences_of, unpadded, varlen
from kernelseam.interop.transformers_pattern import CAUSAL, SEES_ALL, Pattern, decoded
from kernelseam.ops.attention import DENSE
from kernelseam.ops.attention_work import attention_work
from kernelseam.ops.fast_path import FastPath, again, learn

Tensor = Any


def _is_one_query(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is one of each sequence, over contiguous rows."""
    is_one: bool = q.shape[2] == 1 and q.stride(3) == k.stride(3) == v.stride(3) == 1
    return is_one


_LAYER = FastPath(
    attention_work,
    ("q", "k", "v"),
    ("scale", "softcap", "causal"),
    DENSE.defaults,
    _is_one_query,
)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S_q, D], key and value [B, H_kv, S_k, D] → ([B, S_q, H, D], None).

    ``attention_mask`` alone says what is hidden, causality and windows too: as
    ``transformers_pattern`` has it; [B, 1 or H, S_q or 1, keys] of bool, True where a key is seen,
    or of floats, which are added to the scores; a block mask, as Transformers makes it for flex
    attention; or [B, keys] of bool or integers, 0 at padding. None hides nothing. With the last
    two, the layer is causal if ``is_causal`` says so. With [B, keys], and where offsets of packed
    rows alone say what is hidden, both FlashAttention's, it is also if ``is_causal`` is None and
    ``module.is_causal`` says so, unless ``module.config.is_causal`` is False (StableLM's layers do
    not pass that on). Beside None the module is not asked: masks that Transformers makes for SDPA
    may leave causality to it, those for eager attention and ours never do, and some say that they
    are causal of what sees both sides (BridgeTower, the patches of Phi-4 multimodal).
    Beside another mask ``is_causal`` says nothing: some models pass False because there is one.
    ``sliding_window`` is what the mask was made of, and is not applied again.

    ``s_aux`` or ``sinks``: [H], or [B, H, S_q, 1] by query. ``position_bias`` is added to the
    scores and may have gradients. ``indices`` [B, S_q, n] are the only keys that a query sees,
    ``block_indices`` [B, groups of heads, S_q, n] the only blocks of ``module.indexer.block_size``
    keys; entries below 0 are none. Packed rows may be given by ``cu_seq_lens_q``,
    ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``; a mask of four axes has all that they
    say.

    Where only padding is hidden, and nothing compiles the caller, rows of padding are left out of a
    causal attention, and their results are 0; without causality, keys end at each entry's own
    length where padding comes last. Rows of query, key and value that are not contiguous are
    copied.

    Raises InvalidValue for dropout, for ``output_attentions``, and, by its name, for any other
    option that may change the result.
    """
    if dropout or not options.keys() <= OF_THE_MODEL:
        refuse(dropout, options)
    causal = False if is_causal is None else is_causal
    plain = (
        attention_mask is s_aux is sinks is position_bias is indices is block_indices is None
        and cu_seq_lens_q is cu_seq_lens_k is max_length_q is max_length_k is None
    )
    if plain:
        made = again(_LAYER, (query, key, value), (scaling, softcap, causal))
        if made is not None:  # a layer like the one before
            return made[0].transpose(1, 2), None
    blocks: Any = None
    is_plain = attention_mask is None or type(attention_mask) is torch.Tensor
    if not is_plain and is_block_mask(attention_mask):  # as Transformers makes it for flex
        blocks, attention_mask, causal = attention_mask, None, False  # it says all
        cu_seq_lens_q = cu_seq_lens_k = max_length_q = max_length_k = None
    queries, keys = query.shape[2], key.shape[2]
    # Every layer of every step comes here: what is not given is not asked for.
    shared = per_query = mask = packed = bias = kv_lengths = None
    if s_aux is not None or sinks is not None:
        shared, per_query = sinks_of(s_aux, sinks, query.shape)
    if indices is not None or block_indices is not None:
        mask = selection(indices, block_indices, module, query.shape[1], keys)
    if not (cu_seq_lens_q is cu_seq_lens_k is max_length_q is max_length_k is None):
        packed = packed_rows(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if is_causal is None and (
        packed is not None or (attention_mask is not None and attention_mask.dim() == 2)
    ):
        causal = _is_causal(module)
    if position_bias is not None:
        bias = position_bias[..., :keys]

    pattern, whole = CAUSAL if causal else SEES_ALL, None
    if attention_mask is not None:
        pattern, whole = _read(attention_mask, queries, causal)
        if attention_mask.dim() == 4:
            packed = None
    if whole is not None:
        whole = whole[..., :keys]
        if whole.dtype == torch.bool:
            mask = _both(mask, whole)
            if queries == 1 and whole.shape[1] == 1:
                kv_lengths = _last_seen(whole)
        else:
            bias = whole if bias is None else bias + whole
    seen = None if pattern.keys is None else pattern.keys[:, :keys]

    asked: dict[str, Any] = {"scale": scaling, "softcap": softcap, "causal": pattern.causal}
    if pattern.left is not None:
        asked["window"] = (pattern.left, None if pattern.causal else pattern.left)
    if shared is not None:
        asked["sinks"] = shared
    # what rows of one list cannot have
    dense = mask is not None or bias is not None or per_query is not None
    if packed is not None:
        if dense or (seen is not None and seen.dtype != torch.int32):
            raise InvalidValue(
                "cu_seq_lens_q",
                "given",
                "packed rows have no padding, no bias, no selection and no sinks by query",
                "Leave it out, or pass a mask of four axes",
            )
        return varlen(_rows(query, key, value), packed, asked), None
    if seen is not None:
        dense |= torch.compiler.is_compiling()
        if seen.dtype == torch.int32:
            if not dense and queries == keys:
                rows = _rows(query, key, value)
                return varlen(rows, sequences_of(attention_mask, seen), asked), None
            mask = _both(mask, (seen[:, -queries:, None] == seen[:, None])[:, None])
        elif seen.dtype == torch.int8:
            mask = _both(mask, (seen == 1)[:, None, None])
            kv_lengths = (seen >= 0).sum(-1, dtype=torch.int32)
        elif dense or queries == 1:
            mask = _both(mask, seen[:, None, None])
        else:
            padding = padding_of(attention_mask, seen, queries)
            if pattern.causal and (padding.whole or pattern.left is None):
                return unpadded(_rows(query, key, value), padding, asked), None
            if padding.last and pattern.left is None:  # which lengths would shift
                kv_lengths = padding.lengths
            else:
                mask = seen[:, None, None]

    if blocks is not None:
        asked["block_mask"] = blocks
    if mask is not None:
        asked["mask"] = mask
    if bias is not None:
        asked["bias"] = _added(bias, query)
    if kv_lengths is not None:
        asked["kv_lengths"] = kv_lengths
    if per_query is not None:
        rows = _rows(query, key, value)
        result, lse = attention(*rows, layout="bshd", return_lse=True, **asked)
        return _with_sinks(result, lse, per_query), None
    if queries != 1:
        return attention(*_rows(query, key, value), layout="bshd", **asked), None
    # The result of one query is row-major in either order of heads and rows.
    if not _is_one_query(query, key, value):
        query, key, value = map(with_rows, (query, key, value))
    result = attention(query, key, value, **asked)
    if plain:
        learn(_LAYER, (scaling, softcap, pattern.causal))
    return result.transpose(1, 2), None


def _is_causal(module: Any) -> bool:
    """Whether a module says so, and its model's config does not take it back."""
    config = getattr(module, "config", None)
    return getattr(module, "is_causal", False) and getattr(config, "is_causal", None) is not False


def _rows(*given: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, D] → [B, S, H, D], rows contiguous."""
    return tuple([with_rows(x).transpose(1, 2) for x in given])


def _read(mask: Tensor, queries: int, causal: Any) -> tuple[Pattern, Tensor | None]:
    """What a mask says by its pattern, and the mask itself where it says all element by element.
    ``causal``: beside a mask of two axes."""
    pattern = decoded(mask, queries)
    if pattern is not None:
        return pattern, None
    check_mask(mask)
    if mask.dim() == 4:
        return SEES_ALL, mask
    return Pattern(mask.bool(), bool(causal)), None


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _added(bias: Tensor, query: Tensor) -> Tensor:
    """Of a dtype that scores are added in."""
    return bias if bias.dtype in (torch.float32, query.dtype) else bias.to(query.dtype)


def _last_seen(mask: Tensor) -> Tensor:
    """[B]: keys up to the last that the one query of an entry sees; those of a cache that is not
    full are not read."""
    place = torch.arange(1, mask.shape[-1] + 1, dtype=torch.int32, device=mask.device)
    return (mask[:, 0, 0] * place).amax(-1).to(torch.int32)


def _with_sinks(result: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A result [B, S_q, H, D] whose softmax has one more score without a value, [B, H, S_q, 1]."""
    kept = torch.sigmoid(lse - sinks[..., 0]).transpose(1, 2)[..., None]
    return (result * kept).to(result.dtype)
