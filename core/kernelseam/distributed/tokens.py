"""Experts' rows that are tokens, each in several rows: a token goes once to each rank that has any
of its experts, and once comes back, as the sum of its rows there. Every rank tells the others its
counts in one exchange, which the host reads. Rows of own tokens are multiplied while others travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.routes import Route
from kernelseam.distributed.transfers import all_gather
from kernelseam.distributed.trips import Join, Leave, Part, Product, Trips
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_library.bags import Bags

Tensor = Any
_ALL = 0.75
"""Where ranks are expected to have so large a share of the tokens, all tokens go to each."""
_APART = 512
"""Rows of an expert, on average, from which on those of own tokens are multiplied apart, while
others travel; of fewer, reading the weights twice would cost more."""


def _share(ranks: int, rows: int, tokens: int) -> float:
    """Of tokens, each in rows/tokens rows, that a rank has any of, were they spread evenly."""
    return 1 - float((1 - 1 / ranks) ** (rows / max(tokens, 1)))


@lru_cache(256)
def _numbers(device: Any, *numbers: int) -> Tensor:
    """What the host knows, int32 on a device: copied there once."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


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
    """Which of this rank's tokens go to which of n ranks, where not all go to each; none go to the
    rank ``without``."""

    def __init__(self, rows: Rows, tokens: int, size: int, without: int | None) -> None:
        offs, each = rows.offs, rows.offs.shape[0] // size
        ends = offs[each - 1 :: each].contiguous() if each else offs.new_zeros(size)
        number = torch.arange(len(rows.tokens), dtype=torch.int32, device=offs.device)
        # rows behind the last expert's are of no rank
        owner = torch.searchsorted(ends, number, right=True)
        self._cells = owner * tokens + rows.tokens
        there = offs.new_zeros(size + 1, tokens)
        there.view(-1).index_fill_(0, self._cells, 1)
        if without is not None:
            there[without] = 0
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


class _Told:
    """What each rank tells the others, int32 each, while the device goes on."""

    def __init__(self, axis: Axis, told: Tensor, step: str) -> None:
        self._x, self._event = all_gather(axis, told, step), None
        if told.device.type != "cpu":
            self._x = self._x.to("cpu", non_blocking=True)
            self._event = torch.Event(told.device)
            self._event.record()

    def read(self) -> list[list[int]]:
        """Of each rank."""
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
        experts, tokens = rows.offs.shape[0], len(x)
        for i in range(self._products[0]):
            x = applied(i, x)
        told = torch.cat([rows.offs, _numbers(x.device, len(rows.tokens), tokens)])
        everywhere = _Told(axis, told, f"exchange of counts{self.step}")
        pairs = self._pairs(rows.tokens)
        known = everywhere.read()
        read([of[:-1] for of in known])
        each = experts // n
        ends = [(0, *of[:experts]) for of in known]
        cuts = [[of[i * each] for i in range(n + 1)] for of in ends]
        out = [end - begin for begin, end in pairwise(cuts[me])]
        here = [of[me + 1] - of[me] for of in cuts]
        apart = n == 1 or sum(here) >= _APART * each
        coming = [of[-1] for of in known]
        all_go = n == 1 or _share(n, sum(of[-1] for of in cuts), sum(coming)) >= _ALL
        if all_go:
            trips = self._of_all(tokens, coming, apart)
        else:
            trips, places = self._of_some(tokens, apart)
            pairs = self._pairs(places)
        own, leaving = Leave.apply(trips, x)
        first, second, *_ = *self._products, len(self.steps)
        if apart:
            part = self._own(cuts[me][me], cuts[me][me + 1], tokens)
            own = self._through(own, part, applied, first, first + 1)
        if n == 1:
            return self._through(own, part, applied, first + 1)
        # begun behind the own product alone: what follows it runs beside them
        parts = list(pairs[: sum(out)].split(out))
        if apart:
            parts[me] = parts[me][:0]
            out[me] = here[me] = 0
        of_rows = Route(axis, out, here, f"rows' tokens{self.step}")
        pairs = of_rows.begin(parts)
        trips.to_experts(x.detach(), "tokens to experts")
        if apart:
            own = self._through(own, part, applied, first + 1, second)
        mine = [of[me * each : (me + 1) * each + 1] for of in ends]
        if apart:
            mine[me] = (0,) * (each + 1)
        others = self._others(mine, here, of_rows, pairs, trips)
        leaving = self._through(leaving, others, applied, first)
        if apart:
            own = self._through(own, part, applied, second)
        joined: Tensor = Join.apply(trips, leaving, own if apart else None)
        return joined

    def _pairs(self, tokens: Tensor) -> Tensor:
        """Of each row its token, as the bits of a float32, and the factor."""
        factors = self.rows.factors
        of_rows = [tokens.view(torch.float32), *([] if factors is None else [factors])]
        return torch.stack(of_rows, 1)

    def _of_all(self, tokens: int, coming: list[int], apart: bool) -> Trips:
        """All tokens go to each rank; own ones nowhere where they are multiplied apart."""
        going = [tokens] * self.axis.size
        if apart:
            going[self.axis.index] = coming[self.axis.index] = 0
        return Trips(self.axis, going, coming, None, None, self.step)

    def _of_some(self, tokens: int, apart: bool) -> tuple[Trips, Tensor]:
        """Tokens go to the ranks of their experts: how, and of each row its token's place among
        those that go to the same rank."""
        me = self.axis.index
        sent = Sent(self.rows, tokens, self.axis.size, me if apart else None)
        counts = _Told(self.axis, sent.counts.int(), f"exchange of tokens' counts{self.step}")
        taken, placed, ends = sent.lists()
        places = sent.places
        of_ranks = counts.read()
        going, total = of_ranks[me], sum(of_ranks[me])
        bags = Bags(placed[:total], ends)
        coming = [of[me] for of in of_ranks]
        return Trips(self.axis, going, coming, taken[:total], bags, self.step), places

    def _own(self, begin: int, end: int, tokens: int) -> Part:
        """Rows of own tokens, from one to another, of experts here."""
        rows, each = self.rows, self.rows.offs.shape[0] // self.axis.size
        first = self.axis.index * each
        token = rows.tokens[begin:end]
        factors = None if rows.factors is None else rows.factors[begin:end]
        offs = rows.offs[first : first + each] - begin
        return Part(offs, token, tokens, factors, None, self.options)

    def _others(
        self,
        ends: Sequence[Sequence[int]],
        here: Sequence[int],
        of_rows: Route,
        pairs: Tensor,
        trips: Trips,
    ) -> Part:
        """Rows of what comes, whose tokens and factors are under way."""
        offs, order = self._ordered(ends)
        pairs = of_rows.end(pairs)
        token, first = pairs.detach().view(torch.int32)[:, 0].clone(), 0
        for part, count in zip(token.split(here), trips.coming, strict=True):
            if first and len(part):
                part.add_(first)
            first += count
        token = token.index_select(0, order)
        factors = None if self.rows.factors is None else pairs[:, 1].index_select(0, order)
        made = Part(offs, token, first, factors, trips, self.options)
        made.bags  # noqa: B018  while tokens travel
        return made

    def _ordered(self, ends: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Where the rows of each of this rank's experts end, and of each row by expert its place
        among those that came, one rank's after the other's. ``ends``: each rank's."""
        each, device = len(ends[0]) - 1, self.rows.offs.device
        counts, shifts, offs = list[int](), list[int](), list[int]()
        first, total = [0, *accumulate(of[-1] - of[0] for of in ends)], 0
        for expert in range(each):
            for begin, of in zip(first, ends, strict=False):
                counts.append(of[expert + 1] - of[expert])
                shifts.append(begin + of[expert] - of[0] - total)
                total += counts[-1]
            offs.append(total)
        made = torch.tensor([*counts, *shifts, *offs], dtype=torch.int32)
        counted, shifted, of_expert = made.to(device, non_blocking=True).split(
            [len(counts), len(shifts), each]
        )
        number = torch.arange(total, dtype=torch.int32, device=device)
        return of_expert, number + shifted.repeat_interleave(counted, output_size=total)

    def _through(
        self, x: Tensor, part: Part, applied: Any, begin: int, end: int | None = None
    ) -> Tensor:
        """Through the steps from one to another, by default the last."""
        first, *_, last = *self._products, self._products[-1]
        for i, step in list(enumerate(self.steps))[begin:end]:
            if i not in self._products:
                x = applied(i, x)
                continue
            factors = part.factors if i == last else None
            x = Product.apply(part, (i == first, i == last), x, step, factors)
        return x

    @cached_property
    def _products(self) -> list[int]:
        """Which steps are weights."""
        return [i for i, s in enumerate(self.steps) if isinstance(s, torch.Tensor)]
