"""A rank's rows of the whole, and the whole again."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.descriptors.common.validation import flag, integer
from kernelseam.distributed.operands import check_own
from kernelseam.distributed.order import check_divisible, joined, parted
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.transfers import all_gather, reduce_scatter
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import Gradients, differentiable_once

Tensor = Any


def shard(x: Tensor, *, dim: int, group: Any, causal: bool = False) -> Tensor:
    """This rank's rows along ``dim`` of a tensor that every rank has, without a transfer.

    Rank r of n has the r-th of n equal parts; with ``causal``, chunks r and 2n − 1 − r of 2n, in
    this order, by which causal work is even. The first is a view. Differentiable: what flows back
    is this rank's part of the gradient. Raises InvalidValue for a length that the ranks do not
    divide, saying what to pad to.
    """
    axis = axis_of(group)
    dim = _dim(x, dim)
    check_divisible(f"x.shape[{dim}]", x.shape[dim], axis.size, flag("causal", causal))
    return parted(x, axis.size, dim, causal)[axis.index]


def unshard(x: Tensor, *, dim: int, group: Any, causal: bool = False) -> Tensor:
    """The whole of what every rank has its rows of, as ``shard`` cuts it; one all-gather.

    Differentiable: the gradients of all ranks are summed, as of the sum of their losses (one
    reduce-scatter, in x's dtype).
    """
    axis = axis_of(group)
    dim = _dim(x, dim)
    if flag("causal", causal) and x.shape[dim] % 2:
        raise InvalidValue(
            f"x.shape[{dim}]",
            x.shape[dim],
            "has two chunks of one length where causal=True",
            "Shard it with causal=True, too",
        )
    return _Unshard.apply(x, dim, axis, causal)


def _dim(x: Tensor, dim: int) -> int:
    """The axis, not negative, of what must be a tensor."""
    check_own({"x": x}, ("x",))
    if not x.ndim:
        raise InvalidValue("x", "a tensor of no axes", "has no rows", "Pass one that has")
    return integer("dim", dim, -x.ndim, x.ndim - 1, "Name an axis of x") % int(x.ndim)


class _Unshard(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, causal: bool) -> Tensor:
        ctx.dim, ctx.axis, ctx.causal = dim, axis, causal
        whole = all_gather(axis, x.contiguous(), f"unshard on rank {axis.index} of {axis.size}")
        return joined(list(whole), dim, causal).contiguous()

    @staticmethod
    @differentiable_once("kernelseam.distributed.unshard")
    def backward(ctx: Any, given: Tensor) -> Gradients:
        axis = ctx.axis
        parts = torch.stack(parted(given, axis.size, ctx.dim, ctx.causal))
        step = f"gradient of unshard on rank {axis.index} of {axis.size}"
        return reduce_scatter(axis, parts, step), None, None, None
