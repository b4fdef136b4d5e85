"""K and V of all ranks at once: for few KV heads and short sequences, where one collective is less
than a ring's steps. Gradients of both are summed over ranks by one reduce-scatter."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.distributed import pieces
from kernelseam.distributed.order import Run, joined, parted, runs
from kernelseam.distributed.partials import wider
from kernelseam.distributed.pieces import Options, add_gradients
from kernelseam.distributed.plan import parts
from kernelseam.distributed.ring import Ring
from kernelseam.distributed.sums import Sum
from kernelseam.distributed.transfers import all_gather, reduce_scatter

Tensor = Any


def _whole(ring: Ring, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, in its order."""
    axis, split = ring.axis, k.numel()
    result = all_gather(
        axis,
        torch.cat([k.reshape(-1), v.reshape(-1)]),
        f"all-gather of keys and values on rank {axis.index} of {axis.size}",
    )
    return (
        joined(list(result[:, :split].view(axis.size, *k.shape)), 2, ring.balanced),
        joined(list(result[:, split:].view(axis.size, *v.shape)), 2, ring.balanced),
    )


def _parts(ring: Ring) -> Any:
    axis = ring.axis
    queries = runs(axis.index, axis.size, ring.mask.rows_q, ring.balanced)
    return parts(ring.mask, queries, (Run(0, ring.mask.rows_k),))


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(result, LSE) of this rank's queries over all keys."""
    seen = _parts(ring)
    return pieces.forward(q, iter([(*_whole(ring, k, v), seen)]), seen, v.shape[-1], options)


def backward(
    ring: Ring,
    given: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's rows, given the gradients of the result and of the LSE."""
    wide, axis = wider(q.dtype), ring.axis
    all_k, all_v = _whole(ring, k, v)
    dq, dk, dv = sums = Sum(q), Sum(all_k), Sum(all_v)
    add_gradients(sums, given, q, all_k, all_v, out, lse, _parts(ring), options)
    by_rank = torch.stack(
        [
            torch.cat([a.reshape(-1), b.reshape(-1)])
            for a, b in zip(
                *(parted(x.result(wide), axis.size, 2, ring.balanced) for x in (dk, dv)),
                strict=True,
            )
        ]
    )
    own = reduce_scatter(
        axis, by_rank, f"reduce-scatter of dK and dV on rank {axis.index} of {axis.size}"
    )
    return dq.result(q.dtype), own[: k.numel()].view(k.shape), own[k.numel() :].view(v.shape)
