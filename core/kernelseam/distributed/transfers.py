"""What goes between ranks, on torch.distributed: neighbours' sends and receives, and collectives.
Where one does not come, the step it belongs to is logged, then raised.

``Transfer.wait`` makes the current stream wait (on a host: the caller), so that what has arrived
may be used on it at once. Buffers that are sent may be written again after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from kernelseam.distributed.ranks import Axis
from kernelseam.errors import RankLost

Tensor = Any
_log = logging.getLogger(__name__)
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's newer names, else those before."""


@dataclass(eq=False)
class Measured:
    """What was sent and waited for under ``measured``."""

    sent: int = 0
    """Bytes that this process sent to others."""
    _host: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def waited(self) -> float:
        """Seconds that the caller, or on a device its stream, stood still for transfers;
        synchronises."""
        result = self._host
        for begin, end in self._events:
            end.synchronize()
            result += begin.elapsed_time(end) / 1e3
        return result


_measuring: list[Measured] = []


@contextmanager
def measured() -> Iterator[Measured]:
    """Count bytes and waits of this process's calls until the block ends, gradients' too."""
    result = Measured()
    _measuring.append(result)
    try:
        yield result
    finally:
        _measuring.remove(result)


class Transfer:
    """Sends and receives under way."""

    def __init__(
        self, works: Sequence[Any], step: str, like: Tensor, sent: int, kept: object = ()
    ) -> None:
        """``kept``: what must live until all is sent and received."""
        self._works, self._step, self._like, self._kept = works, step, like, kept
        for m in _measuring:
            m.sent += sent

    def wait(self) -> None:
        """Have the current stream wait until all is sent and received."""
        works, self._works, self._kept = self._works, (), ()
        if not works:
            return
        with _waiting(self._like), _named(self._step):
            for work in works:
                work.wait()


def exchange(
    axis: Axis,
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    step: str,
    tag: int = 0,
) -> Transfer:
    """Start sends (what, to which place of the axis) and receives (where to, from which place). Two
    ranks start what goes between them in the same order."""
    _log.debug("%s", step)
    given = [(dist.isend, x, place) for x, place in sends]
    given += [(dist.irecv, x, place) for x, place in receives]
    if not given:
        return Transfer((), step, None, 0)
    if axis.whole and axis.size == 2 and len(sends) == len(receives) == 1:
        with _named(step):
            work = _swapped(axis, sends[0][0], receives[0][0])
        return Transfer([work], step, given[0][1], _bytes(sends[0][0]), given)
    operations = [
        dist.P2POp(kind, x, axis.peer(place), group=axis.group, tag=tag) for kind, x, place in given
    ]
    with _named(step):
        works = dist.batch_isend_irecv(operations)
    return Transfer(works, step, given[0][1], sum(_bytes(x) for x, _ in sends), given)


def _swapped(axis: Axis, sent: Tensor, received: Tensor) -> Any:
    """Between two ranks one collective, which costs the host a third of a send and a receive."""
    out, given = received.view(-1), sent.view(-1)
    splits = [[0, 0], [0, 0]]
    splits[0][1 - axis.index], splits[1][1 - axis.index] = out.numel(), given.numel()
    return dist.all_to_all_single(out, given, *splits, group=axis.group, async_op=True)


def all_gather(axis: Axis, x: Tensor, step: str) -> Tensor:
    """[size, …] of every rank's x, which is contiguous."""
    assert axis.whole
    out = x.new_empty((axis.size, *x.shape))
    _collective(
        step,
        x,
        _bytes(x) * (axis.size - 1),
        lambda: _gather(out.view(-1), x.reshape(-1), group=axis.group),
    )
    return out


def reduce_scatter(axis: Axis, x: Tensor, step: str) -> Tensor:
    """The sum over ranks of x[index], of x [size, …], which is contiguous."""
    assert axis.whole
    out = torch.empty_like(x[0])
    _collective(
        step,
        x,
        _bytes(out) * (axis.size - 1),
        lambda: _reduce(out.view(-1), x.view(-1), group=axis.group),
    )
    return out


def start_gather(axis: Axis, x: Tensor, step: str) -> tuple[Tensor, Transfer]:
    """``all_gather``, to be waited for."""
    out = x.new_empty((axis.size, *x.shape))
    flat, given = out.view(-1), x.view(-1)
    sent = _bytes(x) * (axis.size - 1)
    return out, _started(step, x, sent, lambda: _gather(flat, given, axis.group, True))


def start_scatter(axis: Axis, x: Tensor, step: str) -> tuple[Tensor, Transfer]:
    """``reduce_scatter``, to be waited for."""
    out = torch.empty_like(x[0])
    flat, given, total = out.view(-1), x.view(-1), dist.ReduceOp.SUM
    sent = _bytes(out) * (axis.size - 1)
    return out, _started(step, x, sent, lambda: _reduce(flat, given, total, axis.group, True))


def start_sum(axis: Axis, x: Tensor, step: str) -> tuple[Tensor, Transfer]:
    """x, which takes the sum over ranks once it is waited for."""
    sent = 2 * _bytes(x) * (axis.size - 1) // axis.size
    return x, _started(step, x, sent, lambda: dist.all_reduce(x, group=axis.group, async_op=True))


def _started(step: str, like: Tensor, sent: int, run: Callable[[], Any]) -> Transfer:
    _log.debug("%s", step)
    with _named(step):
        return Transfer([run()], step, like, sent)


def all_to_all(axis: Axis, x: Tensor, step: str) -> Tensor:
    """[size, L] whose row i is what member i had in the row of this one, of x [size, L], which is
    contiguous. Ranks of the group that are no members take part with nothing."""
    out = torch.empty_like(x)
    splits = None
    if not axis.whole:
        splits = [0] * dist.get_world_size(axis.group)
        for member in axis.members:
            splits[member] = x.shape[1]
    _collective(
        step,
        x,
        _bytes(x) // axis.size * (axis.size - 1),
        lambda: dist.all_to_all_single(out.view(-1), x.view(-1), splits, splits, group=axis.group),
    )
    return out


def _collective(step: str, like: Tensor, sent: int, run: Callable[[], object]) -> None:
    _log.debug("%s", step)
    for m in _measuring:
        m.sent += sent
    with _waiting(like), _named(step):
        run()


@contextmanager
def _waiting(like: Tensor) -> Iterator[None]:
    """Count the time of the block, on the current stream of the tensor's device."""
    if not _measuring:
        yield
        return
    if like.device.type == "cpu":
        start = time.perf_counter()
        yield
        for m in _measuring:
            m._host += time.perf_counter() - start
        return
    begin, end = (torch.Event(like.device, enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    for m in _measuring:
        m._events.append((begin, end))


@contextmanager
def _named(step: str) -> Iterator[None]:
    """Log the step that torch.distributed gave up, before its error goes on."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError is one
        _log.error("%s did not come to an end: %s", step, error)
        raise RankLost(step, str(error)) from error


def _bytes(x: Tensor) -> int:
    return int(x.numel() * x.element_size())
