"""Experts' rows that are tokens, each in several rows: a token goes once to each rank that has any
of its experts, and once comes back, as the sum of its rows there. Every rank tells the others its
counts in one exchange, which the host reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.routes import Route
from kernelseam.distributed.transfers import all_gather
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_function import Gradients, differentiable_once
from kernelseam.interop.torch_library.bags import Bags
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any
_FUNCTION = "kernelseam.distributed.grouped_mm"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of tokens, sorted by expert."""

    tokens: Tensor
    """int32 [T]: which token each is of."""
    factors: Tensor | None
    """float32 [T]."""
    offs: Tensor
    """int32 [E]: where each expert's rows end."""


class Sent:
    """Which of this rank's tokens go to which of n ranks."""

    def __init__(self, rows: Rows, tokens: int, size: int) -> None:
        offs, each = rows.offs, rows.offs.shape[0] // size
        ends = offs[each - 1 :: each].contiguous() if each else offs.new_zeros(size)
        number = torch.arange(len(rows.tokens), dtype=torch.int32, device=offs.device)
        # rows behind the last expert's are of no rank
        owner = torch.searchsorted(ends, number, right=True)
        self._cells = owner * tokens + rows.tokens
        there = offs.new_zeros(size + 1, tokens)
        there.view(-1).index_fill_(0, self._cells, 1)
        self._there, self._places = there[:size], there.cumsum(1, dtype=torch.int64) - 1
        self.counts = self._there.sum(1)
        """int64 [n]."""

    @property
    def places(self) -> Tensor:
        """Of each row its token's place among those that go to the same rank."""
        return self._places.view(-1)[self._cells].int()

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that go, one rank's after the other's; which of them each token is, and where
        those of each begin. The first two have room for all tokens to all ranks."""
        there, (size, tokens) = self._there.bool(), self._there.shape
        begin = self.counts.cumsum(0) - self.counts
        place = self._places[:size] + begin[:, None]
        token = torch.arange(tokens, device=there.device)
        ends = pad(self._there.sum(0).cumsum(0), (1, 0))
        before = there.cumsum(0) - 1  # ranks that have the token, before this one
        taken = _compact(place, token.expand(size, -1), there)
        return taken, _compact(ends[:-1] + before, place, there), ends


def _compact(place: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """The values that are there, each at its place."""
    made = place.new_empty(place.numel() + 1)  # the last one takes the others
    made.scatter_(0, place.where(there, place.numel()).flatten(), values.flatten())
    return made


class _Read:
    """Integers of a device that the host reads while the device goes on."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._event = x, None
        if x.device.type != "cpu":
            self._x = x.to("cpu", non_blocking=True)
            self._event = torch.Event(x.device)
            self._event.record()

    def rows(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        found: list[list[int]] = self._x.tolist()
        return found


@dataclass(frozen=True, eq=False)
class Layer:
    """Steps, of which the first product gathers tokens and the last one adds up each token's
    rows."""

    axis: Axis
    steps: Sequence[Any]
    rows: Rows
    options: Mapping[str, Any]
    step: str
    """" on rank r of n"."""

    def run(self, x: Tensor, read: Any, applied: Any) -> Tensor:
        """[tokens, N] of x [tokens, K]. ``read`` refuses what ranks' ends hold, ``applied`` calls a
        step that is a function."""
        axis, rows, n, me = self.axis, self.rows, self.axis.size, self.axis.index
        experts, device = rows.offs.shape[0], x.device
        sent = Sent(rows, len(x), n)
        told = pad(torch.cat([rows.offs, sent.counts.int()]), (0, 1), value=len(rows.tokens))
        everywhere = all_gather(axis, told, f"exchange of counts{self.step}")
        told_to_host = _Read(everywhere)
        # Of each row: its token's place, as the bits of a float32, and the factor.
        said = [sent.places.view(torch.float32)]
        said += [] if rows.factors is None else [rows.factors]
        pairs = torch.stack(said, 1)
        taken, placed, ends_of_tokens = sent.lists()
        ends = everywhere[:, :experts]
        counts = ends.diff(dim=1, prepend=ends.new_zeros(n, 1)).unflatten(1, (n, -1))[:, me]
        received = everywhere[:, experts + me]
        first, of_source = received.cumsum(0) - received, counts.sum(1)
        number = torch.arange(counts.shape[1], device=device, dtype=torch.int32)
        expert, of_expert = number.repeat(n), counts.flatten()
        known = told_to_host.rows()
        read([(*of[:experts], of[-1]) for of in known])

        def rows_of(source: int, place: int) -> int:
            ends, each = (0, *known[source]), experts // n
            return int(ends[(place + 1) * each] - ends[place * each])

        going, coming = known[me][experts:-1], [of[experts + me] for of in known]
        out = [rows_of(me, place) for place in range(n)]
        here = [rows_of(source, me) for source in range(n)]
        of_rows = Route(axis, out, here, f"rows' tokens{self.step}")
        pairs = of_rows.begin(pairs[: sum(out)].split(out))
        taken, bags = taken[: sum(going)], Bags(placed[: sum(going)], ends_of_tokens)
        forth = Route(axis, going, coming, f"tokens to experts{self.step}")
        tokens = forth.begin(_Take.apply(x, taken, bags).split(going))
        first = first.repeat_interleave(of_source, output_size=sum(here))
        expert = expert.repeat_interleave(of_expert, output_size=sum(here))
        by_expert, order = expert.sort(stable=True)
        offs = torch.searchsorted(by_expert, number, right=True, out_int32=True)
        pairs = of_rows.end(pairs)
        place = pairs.detach()[:, 0].contiguous().view(torch.int32)
        token = (place + first)[order].int()
        added = Bags.of(token, sum(coming))
        factors = None if rows.factors is None else pairs[:, 1][order]
        y = self._multiplied(forth.end(tokens), offs, token, added, factors, applied)
        back = Route(axis, coming, going, f"results{self.step}")
        y = back.end(back.begin(y.split(coming)))
        summed: Tensor = _Add.apply(y, taken, bags)
        return summed

    def _multiplied(
        self,
        x: Tensor,
        offs: Tensor,
        token: Tensor,
        added: Bags,
        factors: Tensor | None,
        applied: Any,
    ) -> Tensor:
        """Of the tokens that came their sums over this rank's experts."""
        products = [i for i, s in enumerate(self.steps) if isinstance(s, torch.Tensor)]
        for i, step in enumerate(self.steps):
            if i not in products:
                x = applied(i, x)
                continue
            last = i == products[-1]
            how = _How(offs, token, added, i == products[0], last, self.options)
            x = _Product.apply(how, x, step, factors if last else None)
        return x


@dataclass(frozen=True, eq=False)
class _How:
    """A product of rows by expert."""

    offs: Tensor
    token: Tensor
    bags: Bags
    gathers: bool
    """Its rows are tokens'."""
    adds: bool
    """Its result is the tokens' sums."""
    options: Mapping[str, Any]

    def multiplied(self, a: Tensor, b: Tensor, factors: Tensor | None, of: bool) -> Tensor:
        """Rows by expert, of tokens' rows where ``of``."""
        return grouped_mm(
            a,
            b,
            self.offs,
            a_indices=self.token if of else None,
            out_factors=factors,
            precision=self.options["precision"],
            backend=self.options["backend"],
            implementation=self.options["implementation"],
        )


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, how: _How, x: Tensor, w: Tensor, factors: Tensor | None) -> Tensor:
        y = how.multiplied(x, w, factors, how.gathers)
        ctx.how = how
        ctx.save_for_backward(x, w, factors)
        return how.bags.sums(y) if how.adds else y

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, w, factors = ctx.saved_tensors
        how, (_, of_x, of_w, of_factors) = ctx.how, ctx.needs_input_grad
        options = {**how.options, "implementation": how.options["bwd_implementation"]}
        back = _How(how.offs, how.token, how.bags, how.adds, how.gathers, options)
        dy = dy.contiguous()
        dx = dw = dfactors = None
        rows = x.index_select(0, how.token) if how.gathers and (of_w or of_factors) else x
        if of_x or of_factors:
            dx = back.multiplied(dy, w.mT, None if of_factors else factors, back.gathers)
            if of_factors:
                kind = torch.promote_types(dx.dtype, factors.dtype)
                dfactors = (dx.to(kind) * rows).sum(-1).to(factors.dtype)
                dx = _times(dx, factors)
            dx = (back.bags.sums(dx) if back.adds else dx) if of_x else None
        if of_w:
            right = dy.index_select(0, how.token) if how.adds else dy
            if factors is not None:  # on the narrower side
                if rows.shape[1] <= right.shape[1]:
                    rows = _times(rows, factors)
                else:
                    right = _times(right, factors)
            as_it_lies = w.stride(-2) == 1
            dw = _summed(right, rows, back).mT if as_it_lies else _summed(rows, right, back)
        return None, dx, dw, dfactors


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """x's rows times a number each, in x's dtype."""
    return torch.mul(x, factors[:, None], out=torch.empty_like(x))


def _summed(left: Tensor, right: Tensor, how: _How) -> Tensor:
    """leftᵀ·right of each expert's rows."""
    options = {n: how.options[n] for n in ("precision", "backend", "implementation")}
    return grouped_mm(left.mT, right, how.offs, **options)


class _Take(torch.autograd.Function):  # type: ignore[misc]
    """Rows of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Tensor, bags: Bags) -> Tensor:
        ctx.bags = bags
        return x.index_select(0, taken)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        return ctx.bags.sums(gradient), None, None


class _Add(torch.autograd.Function):  # type: ignore[misc]
    """The sums of these rows: what ``_Take`` does, the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Tensor, bags: Bags) -> Tensor:
        ctx.save_for_backward(taken)
        return bags.sums(x)

    @staticmethod
    @differentiable_once(_FUNCTION)
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        (taken,) = ctx.saved_tensors
        return gradient.index_select(0, taken), None, None
