"""Attention as Transformers' models call it, by ours. Imports torch; Transformers is not needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_autograd import attention, attention_varlen

Tensor = Any


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
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S_q, D], key and value [B, H_kv, S_k, D] → ([B, S_q, H, D], None).

    ``attention_mask`` is as ``transformers_mask`` has it; beside it, [B, keys] of padding, and
    [B, 1 or H, S_q or 1, keys] of bool or to be added to the scores. One of four axes says all of
    what a query sees; with others, ``is_causal`` (the layer's own where it is None) counts from the
    last query and the last key. ``s_aux`` are sinks, ``position_bias`` is added to the scores and
    may have gradients. Packed rows may be given by ``cu_seq_lens_q``, ``cu_seq_lens_k``,
    ``max_length_q`` and ``max_length_k``. What else a model hands over is not needed.

    Where only padding is hidden, and nothing compiles the caller, rows of padding are left out of
    a causal attention, and their results are 0; without ``is_causal``, keys end at each entry's own
    length where padding comes last.

    Raises InvalidValue for dropout and for ``output_attentions``.
    """
    if dropout:
        raise InvalidValue(
            "dropout",
            dropout,
            "must be 0",
            "Set the config's dropout of attentions to 0 (attention_dropout, "
            "attention_probs_dropout_prob, dropout_rate), or call model.eval()",
        )
    if options.get("output_attentions"):
        raise InvalidValue(
            "output_attentions",
            True,
            "probabilities are not kept",
            'Use attn_implementation="eager" for them',
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    asked: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    if s_aux is not None:
        asked["sinks"] = s_aux.float()
    rows = tuple(x.transpose(1, 2) for x in (query, key, value))
    keys = key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 4:
        hidden = attention_mask[..., :keys]
        if hidden.dtype != torch.bool:
            hidden = _added(hidden, query)
            position_bias = hidden if position_bias is None else position_bias + hidden
        else:
            asked["mask"] = hidden
            if query.shape[2] == 1 and hidden.shape[1] == 1:
                asked["kv_lengths"] = _last_seen(hidden)
        is_causal = False
    elif attention_mask is not None:
        folded = attention_mask if attention_mask.dim() == 3 else attention_mask.bool()[:, None]
        folded = folded[..., :keys]
        if folded.shape[1] > 1:
            left = folded.shape[1] - 2
            asked["window"] = (left, None if is_causal else left)
        asked["causal"] = is_causal
        if folded.dtype == torch.int32:
            return _varlen(rows, _sequences(folded), asked), None
        if folded.dtype == torch.int8:
            asked["mask"] = (folded[:, :1] == 1)[:, None]
            asked["kv_lengths"] = (folded[:, 0] >= 0).sum(-1, dtype=torch.int32)
        elif torch.compiler.is_compiling() or query.shape[2] == 1 or position_bias is not None:
            asked["mask"] = folded[:, None, :1]
        else:
            padding = _padding(folded, query.shape[2])
            if is_causal and (padding.whole or "window" not in asked):
                return _unpadded(rows, padding, asked), None
            if padding.last and "window" not in asked:  # which lengths would shift
                asked["kv_lengths"] = padding.lengths
            else:
                asked["mask"] = folded[:, None, :1]
    else:
        if sliding_window is not None and keys > sliding_window:
            left = sliding_window - 1
            asked["window"] = (left, None if is_causal else left)
        asked["causal"] = is_causal
        if (packed := _packed_rows(options)) is not None:
            return _varlen(rows, packed, asked), None
    if position_bias is not None:
        asked["bias"] = _added(position_bias[..., :keys], query)
    return attention(*rows, layout="bshd", **asked), None


def _added(bias: Tensor, query: Tensor) -> Tensor:
    """Of a dtype that scores are added in."""
    return bias if bias.dtype in (torch.float32, query.dtype) else bias.to(query.dtype)


def _last_seen(mask: Tensor) -> Tensor:
    """[B]: keys up to the last that the one query of an entry sees; those of a cache that is not
    full are not read."""
    place = torch.arange(1, mask.shape[-1] + 1, dtype=torch.int32, device=mask.device)
    return (mask[:, 0, 0] * place).amax(-1).to(torch.int32)


class _Packed(NamedTuple):
    """Rows of sequences one after the other."""

    offsets_q: Tensor
    offsets_k: Tensor
    longest_q: int
    longest_k: int


def _packed_rows(options: dict[str, Any]) -> _Packed | None:
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    q, k, longest_q, longest_k = (options.get(n) for n in names)
    if q is None or k is None or longest_q is None or longest_k is None:
        return None
    return _Packed(q.to(torch.int32), k.to(torch.int32), longest_q, longest_k)


def _varlen(rows: tuple[Tensor, ...], packed: _Packed, asked: dict[str, Any]) -> Tensor:
    """All rows of a batch as one list."""
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in rows)
    result = attention_varlen(
        q,
        k,
        v,
        packed.offsets_q,
        packed.offsets_k,
        packed.longest_q,
        packed.longest_k,
        **asked,
    )
    return result.view(*rows[0].shape[:2], *result.shape[1:])


class _Padding(NamedTuple):
    """Which rows are left where padding is taken out. ``whole``: none of it lies between others;
    ``last``: all of it comes after the others."""

    whole: bool
    last: bool
    lengths: Tensor
    indices_q: Tensor
    indices_k: Tensor
    packed: _Packed


def _padding(mask: Tensor, queries: int) -> _Padding:
    """Of [B, window, keys], of which the last are the queries' own. The layers of a model share
    the mask, and so the answer, which a device makes the host wait for."""
    known = getattr(mask, "_kernelseam_padding", None)
    if known is not None and known[0] == (mask._version, queries):
        return known[1]  # type: ignore[no-any-return]
    seen = mask[:, 0]
    of_queries = seen[:, -queries:]
    starts = seen[:, 1:] & ~seen[:, :-1]
    counts = [x.sum(-1, dtype=torch.int32) for x in (of_queries, seen)]
    begins = starts.sum(-1) + seen[:, 0]
    facts = torch.stack([counts[0].max(), counts[1].max(), begins.max(), starts.sum()]).tolist()
    result = _Padding(
        whole=facts[2] <= 1,
        last=facts[3] == 0,
        lengths=counts[1],
        indices_q=of_queries.flatten().nonzero().flatten(),
        indices_k=seen.flatten().nonzero().flatten(),
        packed=_Packed(_offsets(counts[0]), _offsets(counts[1]), facts[0], facts[1]),
    )
    mask._kernelseam_padding = ((mask._version, queries), result)
    return result


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _unpadded(rows: tuple[Tensor, ...], padding: _Padding, asked: dict[str, Any]) -> Tensor:
    """By rows that are no padding; the others' results are 0."""
    places = (padding.indices_q, padding.indices_k, padding.indices_k)
    q, k, v = (x.reshape(-1, *x.shape[2:])[i] for x, i in zip(rows, places, strict=True))
    result = attention_varlen(q, k, v, *padding.packed, **asked)
    queries = rows[0]
    whole = result.new_zeros((queries.shape[0] * queries.shape[1], *result.shape[1:]))
    return whole.index_copy(0, padding.indices_q, result).view(
        *queries.shape[:2], *result.shape[1:]
    )


def _sequences(numbers: Tensor) -> _Packed:
    """Of [B, window, rows]: where the number changes, and where an entry ends, a sequence ends.
    Kept with the tensor, as the layers of a model share it."""
    known = getattr(numbers, "_kernelseam_packed", None)
    if known is not None and known[0] == numbers._version:
        return known[1]  # type: ignore[no-any-return]
    of_rows = numbers[:, 0]
    first = torch.ones_like(of_rows, dtype=torch.bool)
    first[:, 1:] = of_rows[:, 1:] != of_rows[:, :-1]
    begins = first.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(begins, (0, 1), value=of_rows.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    result = _Packed(offsets, offsets, longest, longest)
    numbers._kernelseam_packed = (numbers._version, result)
    return result
