"""Heads for rows, and back: an all-to-all gives each of ``size`` neighbouring ranks its heads of
all their rows. KV heads that are fewer than the ranks go to several, whose gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelseam.distributed.order import joined, parted
from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.transfers import all_to_all
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import Gradients, differentiable_once

Tensor = Any


def misfit(heads: int, kv_heads: int, size: int) -> InvalidValue | None:
    """Why so many ranks cannot share these heads."""
    if heads % size:
        return InvalidValue(
            "H",
            heads,
            f"must be a multiple of the {size} ranks that share the heads",
            "Choose method='ring', or 'mesh' with fewer ranks for the heads",
        )
    if kv_heads % size and size % kv_heads:
        return InvalidValue(
            "H_kv",
            kv_heads,
            f"must divide, or be a multiple of, the {size} ranks that share the heads",
            "Choose method='ring', or 'mesh' with fewer ranks for the heads",
        )
    return None


def heads_for_rows(axis: Axis, xs: Sequence[Tensor], balanced: bool) -> tuple[Tensor, ...]:
    """[B, H/size, size·S, D] of each [B, H, S, D], by one all-to-all; differentiable."""
    return tuple(_HeadsForRows.apply(axis, balanced, *xs))


def rows_for_heads(axis: Axis, xs: Sequence[Tensor], balanced: bool) -> tuple[Tensor, ...]:
    """The inverse: [B, H, S, D] of each [B, H/size, size·S, D]; differentiable."""
    return tuple(_RowsForHeads.apply(axis, balanced, *xs))


def _to_heads(axis: Axis, xs: Sequence[Tensor], balanced: bool) -> list[Tensor]:
    n, sent, shapes = axis.size, [], []
    for x in xs:
        batch, heads, rows, dim = x.shape
        x = x.repeat_interleave(n // heads, 1) if heads < n else x
        each = x.shape[1] // n
        shapes.append((batch, each, rows, dim))
        sent.append(x.reshape(batch, n, each, rows, dim).transpose(0, 1).reshape(n, -1))
    result = all_to_all(axis, torch.cat(sent, 1), _step(axis, "rows"))
    pieces = result.split([x.shape[1] for x in sent], 1)
    return [
        joined([p.view(shape) for p in piece], 2, balanced)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _to_rows(
    axis: Axis, xs: Sequence[Tensor], balanced: bool, heads: Sequence[int]
) -> list[Tensor]:
    """``heads``: how many there are in the end; those that went to several ranks are summed."""
    n, sent = axis.size, []
    for x in xs:
        sent.append(torch.stack([p.reshape(-1) for p in parted(x, n, 2, balanced)]))
    result = all_to_all(axis, torch.cat(sent, 1), _step(axis, "heads"))
    results = []
    pieces = result.split([x.shape[1] for x in sent], 1)
    for piece, x, count in zip(pieces, xs, heads, strict=True):
        batch, each, rows, dim = x.shape
        whole = piece.reshape(n, batch, each, rows // n, dim).transpose(0, 1)
        whole = whole.reshape(batch, n * each, rows // n, dim)
        if count < n * each:
            whole = whole.unflatten(1, (count, -1)).sum(2, dtype=_sums(x.dtype)).to(x.dtype)
        results.append(whole)
    return results


def _sums(dtype: Any) -> Any:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _step(axis: Axis, what: str) -> str:
    return f"all-to-all of {what} on rank {axis.index} of {axis.size}"


class _HeadsForRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: Axis, balanced: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.balanced = axis, balanced
        ctx.heads = [x.shape[1] for x in xs]
        return tuple(_to_heads(axis, xs, balanced))

    @staticmethod
    @differentiable_once("kernelseam.distributed.attention")
    def backward(ctx: Any, *given: Tensor) -> Gradients:
        return (None, None, *_to_rows(ctx.axis, given, ctx.balanced, ctx.heads))


class _RowsForHeads(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, axis: Axis, balanced: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.balanced = axis, balanced
        return tuple(_to_rows(axis, xs, balanced, [x.shape[1] * axis.size for x in xs]))

    @staticmethod
    @differentiable_once("kernelseam.distributed.attention")
    def backward(ctx: Any, *given: Tensor) -> Gradients:
        return (None, None, *_to_heads(ctx.axis, given, ctx.balanced))
