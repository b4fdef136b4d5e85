"""Dispatch of tokens to the ranks of their experts and combine of their results, as autograd
functions: the gradients of results are dispatched as tokens are, and those of tokens combined as
results are. One function begins an exchange and the next waits for it; in between an empty tensor
stands for the rows under way and orders the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.routes import Route
from kernelseam.distributed.sums import write_sum
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_function import Gradients, differentiable_once
from kernelseam.interop.torch_library.bags import Bags
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any
_FUNCTION = "kernelseam.distributed.grouped_mm"


@dataclasses.dataclass(eq=False)
class TokenExchange:
    """Dispatch and combine of one layer, one exchange at a time. A rank's own tokens take part
    unless they are multiplied apart."""

    axis: Axis
    sent: Sequence[int]
    """How many of this rank's tokens go to each rank."""
    received: Sequence[int]
    """How many tokens come from each rank."""
    sent_tokens: Tensor | None
    """int64: which tokens are sent, rank after rank; None where every token goes to every rank."""
    bags: Bags | None
    """Of each token the places in ``sent_tokens``."""
    step: str
    _begun: tuple[Route, Tensor] | None = None

    def dispatch(self, x: Tensor, step: str) -> None:
        """Begin to send tokens' rows to their experts."""
        if self.sent_tokens is None:
            parts = [x[:n] for n in self.sent]
        else:
            parts = x.index_select(0, self.sent_tokens).split(self.sent)
        self._begin(parts, self.received, step, None)

    def combine(self, y: Tensor, bags: Bags, step: str) -> None:
        """Begin to send each token's sum of its rows in y, which are sorted by expert, to its
        rank."""
        ends = (0, *accumulate(self.received))
        of_ranks = [bags.part(*of) for of in pairwise(ends)]
        own = of_ranks[self.axis.index]
        of_ranks[self.axis.index] = own.part(0, 0)
        parts = [x.added(y) for x in of_ranks]
        self._begin(parts, self.sent, step, lambda out: own.added(y, out))

    def combined(self, own: Tensor | None) -> Tensor:
        """Each token's sum of what was received for it and of ``own``, rounded once."""
        received, plus = self.finish(), () if own is None else (own,)
        if self.bags is not None:
            return self.bags.added(received, plus=torch.stack(plus) if plus else None)
        terms = [*plus, *(x for x in received.split(self.sent) if len(x))]
        out = received.new_empty(max(self.sent), received.shape[1])
        write_sum(out, terms)
        return out

    def _begin(self, parts: Any, counts: Sequence[int], step: str, own: Any) -> None:
        assert self._begun is None
        route = Route(self.axis, [], counts, f"{step}{self.step}")
        self._begun = route, route.send(parts, own)

    def finish(self) -> Tensor:
        """The rows of the exchange that was begun last, once they are here."""
        assert self._begun is not None
        (route, out), self._begun = self._begun, None
        route.wait()
        return out


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """A rank's rows of tokens, sorted by expert."""

    offs: Tensor
    token: Tensor
    tokens: int
    factors: Tensor | None
    exchange: TokenExchange | None
    """The exchange that brings the tokens and takes the results; None for own tokens."""
    options: Mapping[str, Any]

    @cached_property
    def bags(self) -> Bags:
        """The rows of each token."""
        return Bags.of(self.token, self.tokens)

    def multiplied(
        self, a: Tensor, b: Tensor, factors: Tensor | None, gathers: bool, backward: bool = False
    ) -> Tensor:
        """a·b of each expert's rows; with ``gathers`` a has a row for each token, which is gathered
        for each of its experts."""
        return grouped_mm(
            a,
            b,
            self.offs,
            a_indices=self.token if gathers else None,
            out_factors=factors,
            **self.product_options(backward),
        )

    def product_options(self, backward: bool) -> dict[str, Any]:
        """Options of ``grouped_mm``."""
        name = "bwd_implementation" if backward else "implementation"
        some = {n: self.options[n] for n in ("precision", "backend")}
        return {**some, "implementation": self.options[name]}


class Dispatch(torch.autograd.Function):  # type: ignore[misc]
    """(own tokens, an empty tensor in place of the sent ones). Its backward combines the gradients
    of both."""

    @staticmethod
    def forward(ctx: Any, exchange: TokenExchange, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, own: Tensor | None, placeholder: Tensor | None) -> Gradients:
        return None, own if placeholder is None else ctx.exchange.combined(own)


class Combine(torch.autograd.Function):  # type: ignore[misc]
    """Each token's sum over the ranks. Its backward dispatches the gradients."""

    @staticmethod
    def forward(
        ctx: Any, exchange: TokenExchange, placeholder: Tensor, own: Tensor | None
    ) -> Tensor:
        ctx.exchange, ctx.apart = exchange, own is not None
        return exchange.combined(own)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        dy = dy.contiguous()
        ctx.exchange.dispatch(dy, "results' gradients")
        return None, dy.new_empty(0), dy if ctx.apart else None


class ExpertProduct(torch.autograd.Function):  # type: ignore[misc]
    """A product of experts' rows; a layer's first one gathers them from tokens, and its last one
    adds up each token's. Where tokens were received, an empty tensor stands for them."""

    @staticmethod
    def forward(
        ctx: Any,
        part: ExpertRows,
        ends: tuple[bool, bool],
        x: Tensor,
        w: Tensor,
        factors: Tensor | None,
    ) -> Tensor:
        gathers, adds = ends
        if gathers and part.exchange is not None:
            x = part.exchange.finish()
        y = part.multiplied(x, w, factors, gathers)
        ctx.part, ctx.ends = part, ends
        ctx.save_for_backward(x, w, factors)
        if not adds:
            return y
        if part.exchange is None:
            return part.bags.added(y)
        part.exchange.combine(y, part.bags, "results")
        return y.new_empty(0)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, w, factors = ctx.saved_tensors
        part, (gathers, adds) = ctx.part, ctx.ends
        _, _, of_x, of_w, of_factors = ctx.needs_input_grad
        dy = part.exchange.finish() if adds and part.exchange is not None else dy.contiguous()
        dx = dw = dfactors = None
        rows = x.index_select(0, part.token) if gathers and (of_w or of_factors) else x
        if of_x or of_factors:
            dx = part.multiplied(dy, w.mT, None if of_factors else factors, adds, True)
            if of_factors:
                kind = torch.promote_types(dx.dtype, factors.dtype)
                dfactors = (dx.to(kind) * rows).sum(-1).to(factors.dtype)
                dx = _times(dx, factors)
            if not of_x:
                dx = None
            elif gathers and part.exchange is None:
                dx = part.bags.added(dx)
            elif gathers:
                part.exchange.combine(dx, part.bags, "tokens' gradients")
                dx = dx.new_empty(0)
        if of_w:
            right = dy.index_select(0, part.token) if adds else dy
            if factors is not None:  # on the narrower side
                if rows.shape[1] <= right.shape[1]:
                    rows = _times(rows, factors)
                else:
                    right = _times(right, factors)
            as_it_lies = w.stride(-2) == 1
            dw = _summed(right, rows, part).mT if as_it_lies else _summed(rows, right, part)
        return None, None, dx, dw, dfactors


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """Each row of x times its factor, in x's dtype."""
    return torch.mul(x, factors[:, None], out=torch.empty_like(x))


def _summed(left: Tensor, right: Tensor, part: ExpertRows) -> Tensor:
    """leftᵀ·right of each expert's rows."""
    return grouped_mm(left.mT, right, part.offs, **part.product_options(True))
