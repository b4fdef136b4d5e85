"""Rows of a padded or packed batch as one list of sequences. Imports torch.

What a mask says of them is asked once and kept with the mask, as the layers of a model share it: a
device makes the host wait for each answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernelseam.interop.torch_autograd import attention_varlen
from kernelseam.interop.transformers_pattern import kept

Tensor = Any


class Packed(NamedTuple):
    """Sequences one after the other: offsets [sequences + 1], int32, and the longest of them."""

    offsets_q: Tensor
    offsets_k: Tensor
    longest_q: int
    longest_k: int


class Padding(NamedTuple):
    """Which rows are left where padding is taken out. ``whole``: none of it lies between others;
    ``last``: all of it comes after the others; ``lengths``: [batch], keys of each entry."""

    whole: bool
    last: bool
    lengths: Tensor
    indices_q: Tensor
    indices_k: Tensor
    packed: Packed


def varlen(rows: tuple[Tensor, ...], packed: Packed, asked: dict[str, Any]) -> Tensor:
    """Attention of all rows [B, S, H, D] of a batch as one list."""
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in rows)
    result = attention_varlen(q, k, v, *packed, **asked)
    return result.view(*rows[0].shape[:2], *result.shape[1:])


def unpadded(rows: tuple[Tensor, ...], padding: Padding, asked: dict[str, Any]) -> Tensor:
    """Attention by rows that are no padding; the others' results are 0."""
    places = (padding.indices_q, padding.indices_k, padding.indices_k)
    q, k, v = (x.reshape(-1, *x.shape[2:])[i] for x, i in zip(rows, places, strict=True))
    result = attention_varlen(q, k, v, *padding.packed, **asked)
    queries = rows[0]
    whole = result.new_zeros((queries.shape[0] * queries.shape[1], *result.shape[1:]))
    return whole.index_copy(0, padding.indices_q, result).view(
        *queries.shape[:2], *result.shape[1:]
    )


def padding_of(mask: Tensor, seen: Tensor, queries: int) -> Padding:
    """Of a mask, given ``seen`` [B, keys] of bool in it, of which the last are the queries' own."""
    return kept(mask, ("padding", queries, seen.shape[1]), lambda: _padding(seen, queries))


def sequences_of(mask: Tensor, numbers: Tensor) -> Packed:
    """Of a mask, given ``numbers`` [B, rows] in it: where the number changes, and where an entry
    ends, a sequence ends."""
    return kept(mask, ("sequences", numbers.shape[1]), lambda: _sequences(numbers))


def _padding(seen: Tensor, queries: int) -> Padding:
    of_queries = seen[:, -queries:]
    starts = seen[:, 1:] & ~seen[:, :-1]
    counts = [x.sum(-1, dtype=torch.int32) for x in (of_queries, seen)]
    begins = starts.sum(-1) + seen[:, 0]
    largest = [x.max() for x in (*counts, begins)]
    totals = [x.sum() for x in (*counts, starts)]
    facts = torch.stack(largest + totals).tolist()
    longest_q, longest_k, runs, rows_q, rows_k, later = facts
    return Padding(
        whole=runs <= 1,
        last=later == 0,
        lengths=counts[1],
        indices_q=_places(of_queries, rows_q),
        indices_k=_places(seen, rows_k),
        packed=Packed(_offsets(counts[0]), _offsets(counts[1]), longest_q, longest_k),
    )


def _places(seen: Tensor, count: int) -> Tensor:
    """Where elements are True, given how many are: nonzero would make the host wait."""
    return (~seen).flatten().to(torch.uint8).argsort(stable=True)[:count]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _sequences(numbers: Tensor) -> Packed:
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    begins = first.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(begins, (0, 1), value=numbers.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    return Packed(offsets, offsets, longest, longest)
