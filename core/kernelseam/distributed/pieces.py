"""A rank's queries over the keys at hand: the calls of a plan and their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import torch

from kernelseam.distributed.mods import Mods
from kernelseam.distributed.partials import Partials, rows_of, wider
from kernelseam.distributed.plan import Part
from kernelseam.distributed.sums import Sum
from kernelseam.frozen import dataclass
from kernelseam.interop import torch_attention

Tensor = Any


@dataclass(frozen=True, eq=False)
class Options:
    """Options that all calls of one attention share."""

    forward: Mapping[str, Any]
    """Options of the forward: scores' numbers, backend, implementation, batch_invariant."""
    backward: Mapping[str, Any]
    """Options of the backward: scores' numbers, backend, implementation, deterministic."""
    slopes: Tensor | None = None
    """ALiBi slopes, [H] or [B, H]."""
    lengths: Tensor | None = None
    """int32 [B]: prefix lengths or KV lengths, in keys of the whole."""
    states: Any = None
    """The dtype of a call's result before results are merged; None: that of sums."""
    mods: Mods | None = None
    """A score_mod and a mask_mod, which see positions in the whole."""
    narrow: bool = False
    """Whether the result has q's dtype and is merged with no other: a single call that sees all
    keys may then round it."""


def forward(
    q: Tensor,
    k_and_v: Iterator[tuple[Tensor, Tensor, Sequence[Part]]],
    all_parts: Sequence[Part],
    value_dim: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(result, LSE) of q [B, H, S_q, D] over keys [B, H_kv, S_k, D] and values that arrive one
    after the other, each with its parts. ``all_parts``: the parts of all of them."""
    wide = wider(q.dtype)
    dtype = q.dtype if options.narrow else wide
    shape = (*q.shape[:-1], value_dim)
    # One call that sees all keys may round its result.
    alone = len(all_parts) == 1 and all_parts[0].m == q.shape[2]
    begun = list(islice(k_and_v, 1))  # the first transfer is under way before memory is prepared
    partials = Partials(
        shape,
        q,
        dtype if alone else options.states or wide,
        all_parts,
        options.forward.get("backend"),
    )
    for k, v, parts in chain(begun, k_and_v):
        for part in parts:
            operands, given, moved = _call(part, q, k, v, options)
            out, lse = partials.room(part)
            operands["out"] = out if part.offsets is None else out[0].transpose(0, 1)
            _, made = torch_attention.forward(
                operands, {**options.forward, **given, "return_lse": True}
            )
            lse.copy_(made if moved is None else made + moved)
    return partials.result(dtype)


def add_gradients(
    sums: tuple[Sum, Sum, Sum],
    given: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    parts: Sequence[Part],
    options: Options,
) -> None:
    """Add these keys' share to the sums of dq, dk and dv, given the result and LSE over all keys
    and the gradients of both."""
    for part in parts:
        operands, asked, moved = _call(part, q, k, v, options)
        of_rows = [
            None if x is None else rows_of(x, part.query, part.m) for x in (*given, out, lse)
        ]
        if moved is not None:
            of_rows[3] = of_rows[3] - moved
        dout, dlse, result, of_lse = of_rows
        if part.offsets is not None:
            dout, result = (None if x is None else x[0].transpose(0, 1) for x in (dout, result))
            dlse, of_lse = (None if x is None else x[0] for x in (dlse, of_lse))
        gradients = torch_attention.gradients(
            dout,
            dlse,
            operands,
            result,
            of_lse,
            bias_gradient=False,
            sink_gradient=False,
            **options.backward,
            **asked,
        )
        for total, x, begin in zip(
            sums, gradients[:3], (part.query, part.key, part.key), strict=True
        ):
            total.add(begin, x if part.offsets is None else x.transpose(0, 1).unsqueeze(0))


def _call(
    part: Part, q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[dict[str, Tensor], dict[str, Any], Tensor | None]:
    """(operands, options, what is to be added to the rows' LSEs) of a part's call."""
    q = rows_of(q, part.query, part.m)
    k, v = rows_of(k, part.key, part.n), rows_of(v, part.key, part.n)
    operands = {"q": q, "k": k, "v": v}
    given: dict[str, Any] = {}
    if part.window != (None, None):
        given["causal"] = part.window == (None, 0)
        if not given["causal"]:
            given["window"] = part.window
    if part.prefix or part.lengths:
        assert options.lengths is not None
        name = "prefix_lengths" if part.prefix else "kv_lengths"
        operands[name] = (options.lengths - part.first_key).clamp_(0, part.n).to(torch.int32)
    if options.mods is not None:
        given["score_mod"] = options.mods.of(part)
    moved = None
    if part.slopes == "diagonal":
        operands["alibi_slopes"] = options.slopes
    elif part.slopes:
        operands["bias"], moved = _apart(part, q, options.slopes)
    if part.offsets is not None:
        for name in "qkv":
            operands[name] = operands[name][0].transpose(0, 1)
        offsets = _on_device(part.offsets, q.device)
        operands["cu_seqlens_q"] = operands["cu_seqlens_k"] = offsets
        most = max(b - a for a, b in zip(part.offsets, part.offsets[1:], strict=False))
        given["max_seqlen_q"] = given["max_seqlen_k"] = most
    return operands, given, moved


def _apart(part: Part, q: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """ALiBi where all keys lie on one side: −slope·|d| is a number of the key, a bias that repeats
    along the queries, and one of the query, which moves its LSE and nothing else. Both are of
    distances within the part, so that they are small where the part is."""
    slope = slopes.to(wider(q.dtype)).reshape(-1, q.shape[1], 1)
    key = torch.arange(part.n, device=q.device, dtype=slope.dtype)
    row = torch.arange(part.m, device=q.device, dtype=slope.dtype)
    if part.slopes == "before":
        gap = part.first_query - (part.first_key + part.n - 1)
        key, row = part.n - 1 - key, row + gap
    else:
        gap = part.first_key - (part.first_query + part.m - 1)
        row = part.m - 1 - row + gap
    return (-slope * key).unsqueeze(2), -slope * row


@lru_cache(maxsize=64)
def _on_device(offsets: tuple[int, ...], device: Any) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=device)
