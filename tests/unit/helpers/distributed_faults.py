"""Faults planted into this process's distributed attention: each must be seen by a test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def planted(fault: str | None, group: Any) -> Iterator[None]:
    if fault is None:
        yield
        return
    import torch
    import torch.distributed as dist
    from kernelseam.distributed import (
        calls,
        gathered,
        mods,
        order,
        pieces,
        plan,
        ring,
        running,
        sums,
        transfers,
    )
    from kernelseam.ops import merge

    def replace(where: Any, name: str, value: Any) -> Any:
        return mock.patch.object(where, name, value)

    with ExitStack() as stack:
        stack.enter_context(replace(calls, "_setups", {}))
        if fault == "skipped chunk":
            right = ring.Ring.parts
            stack.enter_context(
                replace(ring.Ring, "parts", lambda self, t: right(self, t) if t != 1 else ())
            )
        elif fault == "wrong merge":
            joined = merge.merge_states

            def added(outs: Any, lses: Any, **given: Any) -> Any:
                out, lse = joined(outs, lses, **given)
                return out.copy_(outs.where(lses.unsqueeze(-1) > -torch.inf, 0).sum(0)), lse

            stack.enter_context(replace(merge, "merge_states", added))
        elif fault == "lost wait":
            late: list[Any] = []
            wait, right_forward = transfers.Transfer.wait, ring.forward

            def forward(*given: Any) -> Any:
                with replace(transfers.Transfer, "wait", lambda self: late.append(self)):
                    made = right_forward(*given)
                for transfer in late:
                    wait(transfer)
                return made

            stack.enter_context(replace(ring, "forward", forward))
            if dist.get_rank(group) == 0:  # the others have used what did not arrive
                time.sleep(0.5)
        elif fault == "chunks in the wrong order":
            swapped = order.runs

            def wrong(index: int, size: int, rows: int, balanced: bool) -> Any:
                return swapped(index, size, rows, balanced)[::-1]

            for module in (ring, gathered):
                stack.enter_context(replace(module, "runs", wrong))
        elif fault == "states rounded early":  # no fault: as on devices where that is faster
            stack.enter_context(replace(running, "states_dtype", lambda q, *_: q.dtype))
        elif fault == "the wrong keys":
            of_step = ring.Ring.parts
            stack.enter_context(
                replace(ring.Ring, "parts", lambda self, t: of_step(self, -t % self.axis.size))
            )
        elif fault == "sums not sent home":
            right_back = ring.backward

            def backward(around: Any, *given: Any) -> Any:
                dq, dk, dv = right_back(around, *given)
                return dq, dk * (around.axis.index > 0), dv

            stack.enter_context(replace(ring, "backward", backward))
        elif fault == "keys' gradients counted twice":
            whole = pieces.add_gradients

            def twice(of: Any, *given: Any) -> None:
                whole(of, *given)
                whole((sums.Sum(of[0]._like), of[1], sums.Sum(of[2]._like)), *given)

            stack.enter_context(replace(ring, "add_gradients", twice))
        elif fault == "sink counted by every rank":
            of = running._of_sinks
            stack.enter_context(replace(running, "_of_sinks", lambda *a: of(*a) * 2))
        elif fault == "window of the shard":
            right_parts = plan.parts

            def parts(mask: Any, queries: Any, keys: Any) -> Any:
                found = right_parts(mask, queries, keys)
                return tuple(
                    p.__class__(**{**p.__dict__, "window": (mask.left, mask.right)}) for p in found
                )

            stack.enter_context(replace(ring, "parts", parts))
        elif fault == "indices of the shard":
            stack.enter_context(replace(mods.Mods, "of", lambda self, part: self.expression))
        else:
            raise AssertionError(fault)
        yield
