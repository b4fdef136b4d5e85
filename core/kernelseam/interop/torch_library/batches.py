"""torch.vmap over operators: the mapped axis becomes part of the batch, or the operator is called
once an element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = Any
Batched = tuple[Any, Any]


def flat(args: Sequence[Any]) -> list[Any]:
    """Arguments, tensors of lists among them."""
    return [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]


def as_before(flat: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """What belongs to the arguments that ``flat`` made flat, in lists where they are."""
    rest = iter(flat)
    return [[next(rest) for _ in x] if isinstance(x, list | tuple) else next(rest) for x in args]


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


def one_by_one(operator: Callable[..., Any]) -> Callable[..., Batched]:
    """A rule of torch.vmap: one call an element."""

    def batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
        return each(operator, info.batch_size, in_dims, args, options)

    return batched


def with_empty_axes(batched: Callable[..., Batched]) -> Callable[..., Batched]:
    """The rule for a mapped axis of extent 0 as well: its results are those of one element of
    zeros, which is then left out."""

    def whole(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
        if info.batch_size:
            return batched(info, in_dims, *args, **options)
        one = [_one(x, d) for x, d in zip(args, in_dims, strict=True)]
        results, dims = batched(info._replace(batch_size=1), in_dims, *one, **options)
        if isinstance(results, torch.Tensor):
            return results.narrow(dims, 0, 0), dims
        none = [x.narrow(d, 0, 0) for x, d in zip(results, dims, strict=True)]
        return type(results)(none), dims

    return whole


def _one(x: Any, dim: Any) -> Any:
    """An element of zeros in place of none, with a gradient where there may be one; of a list for
    each of its tensors."""
    if isinstance(x, list | tuple):
        return [_one(y, d) for y, d in zip(x, dim, strict=True)]
    if dim is None:
        return x
    zeros = x.new_zeros([1 if i == dim else n for i, n in enumerate(x.shape)])
    return torch.cat((x, zeros), dim) if x.requires_grad else zeros


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
