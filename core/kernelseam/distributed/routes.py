"""All-to-all exchanges of rows that torch differentiates. An exchange is begun and later waited
for; work in between overlaps with it. In the backward the gradients go the other way: sending them
begins when the received rows' gradient is known, and ends when that of the sent rows is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.transfers import Transfer, exchange
from kernelseam.interop.torch_function import Gradients, differentiable_once

Tensor = Any
Write = Callable[[Tensor], object]
_FUNCTION = "kernelseam.distributed.grouped_mm"


class Route:
    """``sent`` rows to each member of an axis, and ``received`` ones from each. Every member begins
    its routes in the same order."""

    def __init__(self, axis: Axis, sent: Sequence[int], received: Sequence[int], step: str) -> None:
        self.axis, self.sent, self.received, self._step = axis, list(sent), list(received), step
        self._transfer: Transfer | None = None
        self._kept: Sequence[Tensor] = ()
        self.back: Tensor | None = None

    def begin(self, parts: Sequence[Tensor]) -> Tensor:
        """Begin to send ``parts``, one to each member. Returns [received rows, columns], whose
        content is there after ``end``."""
        made: Tensor = _Begin.apply(self, *parts)
        return made

    def end(self, x: Tensor) -> Tensor:
        """The rows that ``begin`` returned, once they are received."""
        waited: Tensor = _End.apply(self, x)
        return waited

    def start(
        self, parts: Sequence[Tensor], lengths: Sequence[int], step: str, own: Write | None = None
    ) -> Tensor:
        """Send the parts, and receive parts of these lengths into what is returned. ``own`` writes
        this rank's part to where it belongs, a copy by default, while the others travel."""
        out = parts[0].new_empty(sum(lengths), parts[0].shape[1])
        places, mine = out.split(lengths), self.axis.index
        self._kept = [p.contiguous() for p in parts]
        others = [i for i in range(self.axis.size) if i != mine]
        self._transfer = exchange(
            self.axis,
            [(self._kept[i], i) for i in others if len(self._kept[i])],
            [(places[i], i) for i in others if len(places[i])],
            step,
        )
        if own is None:
            places[mine].copy_(self._kept[mine])
        else:
            own(places[mine])
        return out

    def wait(self) -> None:
        """Wait for the exchange that was started last."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None
        transfer.wait()
        self._kept = ()

    def send(self, parts: Sequence[Tensor], own: Write | None = None) -> Tensor:
        """``begin`` without gradients; ``own`` as in ``start``."""
        return self.start(parts, self.received, self._step, own)

    def send_back(self, gradient: Tensor) -> None:
        """Begin to send gradients of the received rows back."""
        parts = gradient.split(self.received)
        self.back = self.start(parts, self.sent, f"{self._step}, gradients")


class _Begin(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, route: Route, *parts: Tensor) -> Tensor:
        ctx.route = route
        return route.send(parts)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, _: Tensor) -> Gradients:
        route = ctx.route
        route.wait()
        back, route.back = route.back, None
        return None, *back.split(route.sent)


class _End(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, route: Route, x: Tensor) -> Tensor:
        ctx.route = route
        route.wait()
        return x.view_as(x)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        ctx.route.send_back(gradient)
        return None, gradient
