"""Where tokens go to the ranks of their experts and their sums come home, as torch differentiates
it: gradients of sums go the way of the tokens, and those of tokens the way of the sums. What is
under way is begun by one function and waited for by the next, behind an empty tensor that stands
for it and orders both.
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
class Trips:
    """The ways of tokens to experts, and of their sums home, one at a time. Own tokens are among
    them where they are not multiplied apart."""

    axis: Axis
    going: Sequence[int]
    """Of this rank's tokens, to each rank."""
    coming: Sequence[int]
    taken: Tensor | None
    """int64: the tokens that go, one rank's after the other's; None where all go."""
    bags: Bags | None
    """Which of them each token is."""
    step: str
    _begun: tuple[Route, Tensor] | None = None

    def to_experts(self, x: Tensor, step: str) -> None:
        """Begin to send tokens' rows."""
        if self.taken is None:
            parts = [x[:n] for n in self.going]
        else:
            parts = x.index_select(0, self.taken).split(self.going)
        self._begin(parts, self.coming, step, None)

    def home(self, y: Tensor, bags: Bags, step: str) -> None:
        """Begin to send the sums of tokens, of rows y by expert."""
        ends = (0, *accumulate(self.coming))
        of_ranks = [bags.part(*of) for of in pairwise(ends)]
        own = of_ranks[self.axis.index]
        of_ranks[self.axis.index] = own.part(0, 0)
        parts = [x.added(y) for x in of_ranks]
        self._begin(parts, self.going, step, lambda out: own.added(y, out))

    def joined(self, own: Tensor | None) -> Tensor:
        """Of each token the sum of what comes home and ``own``, rounded once."""
        arrived, plus = self.arrived(), () if own is None else (own,)
        if self.bags is not None:
            return self.bags.added(arrived, plus=torch.stack(plus) if plus else None)
        terms = [*plus, *(x for x in arrived.split(self.going) if len(x))]
        out = arrived.new_empty(max(self.going), arrived.shape[1])
        write_sum(out, terms)
        return out

    def _begin(self, parts: Any, counts: Sequence[int], step: str, own: Any) -> None:
        assert self._begun is None
        route = Route(self.axis, [], counts, f"{step}{self.step}")
        self._begun = route, route.forth(parts, own)

    def arrived(self) -> Tensor:
        """What was begun last, when it has come."""
        assert self._begun is not None
        (route, out), self._begun = self._begun, None
        route.wait()
        return out


@dataclass(frozen=True, eq=False)
class Part:
    """Rows by expert."""

    offs: Tensor
    token: Tensor
    tokens: int
    factors: Tensor | None
    trips: Trips | None
    """Where the tokens come from and their sums go; None of own ones."""
    options: Mapping[str, Any]

    @cached_property
    def bags(self) -> Bags:
        """Which rows each token has."""
        return Bags.of(self.token, self.tokens)

    def multiplied(
        self, a: Tensor, b: Tensor, factors: Tensor | None, of: bool, of_gradient: bool = False
    ) -> Tensor:
        """Rows by expert, of tokens' rows where ``of``."""
        return grouped_mm(
            a,
            b,
            self.offs,
            a_indices=self.token if of else None,
            out_factors=factors,
            **self.chosen(of_gradient),
        )

    def chosen(self, of_gradient: bool) -> dict[str, Any]:
        """The options of a product."""
        name = "bwd_implementation" if of_gradient else "implementation"
        some = {n: self.options[n] for n in ("precision", "backend")}
        return {**some, "implementation": self.options[name]}


class Leave(torch.autograd.Function):  # type: ignore[misc]
    """Own tokens, and what stands for those that travel: their gradients come home behind it."""

    @staticmethod
    def forward(ctx: Any, trips: Trips, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.trips = trips
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.new_empty(0)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, own: Tensor | None, leaving: Tensor | None) -> Gradients:
        return None, own if leaving is None else ctx.trips.joined(own)


class Join(torch.autograd.Function):  # type: ignore[misc]
    """The tokens' sums, of those that came home and of own rows."""

    @staticmethod
    def forward(ctx: Any, trips: Trips, leaving: Tensor, own: Tensor | None) -> Tensor:
        ctx.trips, ctx.apart = trips, own is not None
        return trips.joined(own)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        dy = dy.contiguous()
        ctx.trips.to_experts(dy, "results' gradients")
        return None, dy.new_empty(0), dy if ctx.apart else None


class Product(torch.autograd.Function):  # type: ignore[misc]
    """Of rows; the first gathers them from tokens, and the last adds tokens' up. Where tokens come
    from elsewhere and their sums go there, an empty tensor stands for them."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, ends: tuple[bool, bool], x: Tensor, w: Tensor, factors: Tensor | None
    ) -> Tensor:
        gathers, adds = ends
        if gathers and part.trips is not None:
            x = part.trips.arrived()
        y = part.multiplied(x, w, factors, gathers)
        ctx.part, ctx.ends = part, ends
        ctx.save_for_backward(x, w, factors)
        if not adds:
            return y
        if part.trips is None:
            return part.bags.added(y)
        part.trips.home(y, part.bags, "results")
        return y.new_empty(0)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, w, factors = ctx.saved_tensors
        part, (gathers, adds) = ctx.part, ctx.ends
        _, _, of_x, of_w, of_factors = ctx.needs_input_grad
        dy = part.trips.arrived() if adds and part.trips is not None else dy.contiguous()
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
            elif gathers and part.trips is None:
                dx = part.bags.added(dx)
            elif gathers:
                part.trips.home(dx, part.bags, "tokens' gradients")
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
    """x's rows times a number each, in x's dtype."""
    return torch.mul(x, factors[:, None], out=torch.empty_like(x))


def _summed(left: Tensor, right: Tensor, part: Part) -> Tensor:
    """leftᵀ·right of each expert's rows."""
    return grouped_mm(left.mT, right, part.offs, **part.chosen(True))
