"""torch.vmap over operators: the mapped axis becomes part of the batch, or the operator is called
once an element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = Any
Batched = tuple[Any, Any]


def each(
    operator: Callable[..., Any],
    count: int,
    in_dims: Sequence[int | None],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> Batched:
    """One call an element, results stacked. For what does not fold into a batch."""
    rows = [
        operator(
            *[x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)],
            **options,
        )
        for i in range(count)
    ]
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(x) for x in zip(*rows, strict=True)), (0,) * len(rows[0])
    return torch.stack(rows), 0


def fold(x: Tensor | None, dim: int | None, count: int, axis: int = 0) -> Tensor | None:
    """A tensor whose mapped axis has become the outer part of its axis ``axis``; one without a
    mapped axis repeats."""
    if x is None:
        return None
    whole = x.unsqueeze(axis).expand(*x.shape[:axis], count, *x.shape[axis:])
    return (whole if dim is None else x.movedim(dim, axis)).flatten(axis, axis + 1)


def unfold(results: Any, count: int, axis: int = 0) -> Batched:
    """Results of what ``fold`` made, with the mapped axis at ``axis``; empty ones that stand for
    nothing repeat."""
    if not isinstance(results, tuple):
        return results.unflatten(axis, (count, results.shape[axis] // count)), axis
    apart = [(x.expand(count, 0), 0) if x.dim() == 1 else unfold(x, count, axis) for x in results]
    return tuple(x for x, _ in apart), tuple(d for _, d in apart)


def repeats(x: Tensor | None, dim: int | None, rank: int) -> bool:
    """Whether an operand is the same for every entry of a batch of arrays of this rank."""
    return x is None or (dim is None and (x.dim() < rank or x.shape[0] == 1))
