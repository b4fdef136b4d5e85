"""Expert-parallel layers over tokens, each with several experts. A token is sent once to each rank
that has any of its experts, and that rank returns one row, the sum of the token's rows there. Ranks
exchange their counts first, which the host reads. Rows of own tokens are multiplied while others
are under way.
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
from kernelseam.distributed.token_exchange import (
    Combine,
    Dispatch,
    ExpertProduct,
    ExpertRows,
    TokenExchange,
)
from kernelseam.distributed.transfers import all_gather
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_library.bags import Bags

Tensor = Any
_SEND_ALL = 0.75
"""Expected share of the tokens that a rank needs, from which on every rank is sent all of them."""
_OWN_APART = 512
"""Average rows of an expert from which on those of own tokens are multiplied apart, while others
are under way; with fewer, reading the weights twice would cost more."""


def _expected_share(ranks: int, rows: int, tokens: int) -> float:
    """The share of tokens that have an expert on a given rank, where each has rows/tokens experts
    drawn evenly."""
    return 1 - float((1 - 1 / ranks) ** (rows / max(tokens, 1)))


@lru_cache(256)
def _numbers(device: Any, *numbers: int) -> Tensor:
    """Numbers of the host as an int32 tensor of a device, which is cached."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of tokens, sorted by expert."""

    tokens: Tensor
    """int32 [T]: each row's token."""
    factors: Tensor | None
    """float32 [T]."""
    offs: Tensor
    """int32 [E]: where each expert's rows end."""


class Destinations:
    """Which of this rank's tokens go to which of n ranks; none go to the rank ``without``."""

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
        """int64 [n]: tokens for each rank."""

    @property
    def places(self) -> Tensor:
        """Of each row, its token's position among those sent to the same rank."""
        return self._places.view(-1)[self._cells].int()

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens to send, rank after rank; positions in that list, token after token; where each
        token's positions begin). The first two have room for all tokens to all ranks."""
        there, (size, tokens) = self._there.bool(), self._there.shape
        begin = self.counts.cumsum(0) - self.counts
        place = self._places[:size] + begin[:, None]
        token = torch.arange(tokens, device=there.device)
        ends = pad(self._there.sum(0).cumsum(0), (1, 0))
        before = there.cumsum(0) - 1  # ranks that have the token, before this one
        taken = _compact(place, token.expand(size, -1), there)
        return taken, _compact(ends[:-1] + before, place, there), ends


def _compact(place: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """The values for which ``there`` is True, each at its place."""
    made = place.new_empty(place.numel() + 1)  # the last one takes the others
    made.scatter_(0, place.where(there, place.numel()).flatten(), values.flatten())
    return made


class _Counts:
    """An all-gather of int32 numbers that the host reads later, while the device goes on."""

    def __init__(self, axis: Axis, own_counts: Tensor, step: str) -> None:
        self._x, self._event = all_gather(axis, own_counts, step), None
        if own_counts.device.type != "cpu":
            self._x = self._x.to("cpu", non_blocking=True)
            self._event = torch.Event(own_counts.device)
            self._event.record()

    def read(self) -> list[list[int]]:
        """Each rank's numbers."""
        if self._event is not None:
            self._event.synchronize()
        found: list[list[int]] = self._x.tolist()
        return found


@dataclass(frozen=True, eq=False)
class ExpertLayer:
    """Weights and functions in order: the first product gathers tokens' rows by expert, the last
    one adds up each token's."""

    axis: Axis
    steps: Sequence[Any]
    rows: Rows
    options: Mapping[str, Any]
    step: str
    """" on rank r of n"."""

    def run(self, x: Tensor, read: Any, applied: Any) -> Tensor:
        """[tokens, N] from x [tokens, K]. ``read`` validates every rank's offsets, ``applied``
        calls a step that is a function."""
        axis, rows, n, me = self.axis, self.rows, self.axis.size, self.axis.index
        experts, tokens = rows.offs.shape[0], len(x)
        for i in range(self._products[0]):
            x = applied(i, x)
        own_counts = torch.cat([rows.offs, _numbers(x.device, len(rows.tokens), tokens)])
        gathered = _Counts(axis, own_counts, f"exchange of counts{self.step}")
        pairs = self._pairs(rows.tokens)
        counts = gathered.read()
        read([of[:-1] for of in counts])
        each = experts // n
        ends = [(0, *of[:experts]) for of in counts]
        cuts = [[of[i * each] for i in range(n + 1)] for of in ends]
        out = [end - begin for begin, end in pairwise(cuts[me])]
        here = [of[me + 1] - of[me] for of in cuts]
        apart = n == 1 or sum(here) >= _OWN_APART * each
        received = [of[-1] for of in counts]
        all_go = (
            n == 1 or _expected_share(n, sum(of[-1] for of in cuts), sum(received)) >= _SEND_ALL
        )
        if all_go:
            exchange = self._of_all(tokens, received, apart)
        else:
            exchange, places = self._of_some(tokens, apart)
            pairs = self._pairs(places)
        own, placeholder = Dispatch.apply(exchange, x)
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
        exchange.dispatch(x.detach(), "tokens to experts")
        if apart:
            own = self._through(own, part, applied, first + 1, second)
        mine = [of[me * each : (me + 1) * each + 1] for of in ends]
        if apart:
            mine[me] = (0,) * (each + 1)
        others = self._others(mine, here, of_rows, pairs, exchange)
        placeholder = self._through(placeholder, others, applied, first)
        if apart:
            own = self._through(own, part, applied, second)
        joined: Tensor = Combine.apply(exchange, placeholder, own if apart else None)
        return joined

    def _pairs(self, tokens: Tensor) -> Tensor:
        """[rows, 1 or 2]: each row's token, its bits as a float32, and its factor if there are
        any."""
        factors = self.rows.factors
        of_rows = [tokens.view(torch.float32), *([] if factors is None else [factors])]
        return torch.stack(of_rows, 1)

    def _of_all(self, tokens: int, received: list[int], apart: bool) -> TokenExchange:
        """The exchange of all tokens with every rank, without own ones where they are multiplied
        apart."""
        sent = [tokens] * self.axis.size
        if apart:
            sent[self.axis.index] = received[self.axis.index] = 0
        return TokenExchange(self.axis, sent, received, None, None, self.step)

    def _of_some(self, tokens: int, apart: bool) -> tuple[TokenExchange, Tensor]:
        """(the exchange of tokens with the ranks of their experts, each row's token's position
        among those sent to the same rank)."""
        me = self.axis.index
        to = Destinations(self.rows, tokens, self.axis.size, me if apart else None)
        counts = _Counts(self.axis, to.counts.int(), f"exchange of tokens' counts{self.step}")
        taken, placed, ends = to.lists()
        places = to.places
        of_ranks = counts.read()
        sent, total = of_ranks[me], sum(of_ranks[me])
        bags = Bags(placed[:total], ends)
        received = [of[me] for of in of_ranks]
        return TokenExchange(self.axis, sent, received, taken[:total], bags, self.step), places

    def _own(self, begin: int, end: int, tokens: int) -> ExpertRows:
        """Rows ``begin`` to ``end``: own tokens of this rank's experts."""
        rows, each = self.rows, self.rows.offs.shape[0] // self.axis.size
        first = self.axis.index * each
        token = rows.tokens[begin:end]
        factors = None if rows.factors is None else rows.factors[begin:end]
        offs = rows.offs[first : first + each] - begin
        return ExpertRows(offs, token, tokens, factors, None, self.options)

    def _others(
        self,
        ends: Sequence[Sequence[int]],
        here: Sequence[int],
        of_rows: Route,
        pairs: Tensor,
        exchange: TokenExchange,
    ) -> ExpertRows:
        """Rows of received tokens; ``pairs``, their tokens and factors, are under way."""
        offs, order = self._ordered(ends)
        pairs = of_rows.end(pairs)
        token, first = pairs.detach().view(torch.int32)[:, 0].clone(), 0
        for part, count in zip(token.split(here), exchange.received, strict=True):
            if first and len(part):
                part.add_(first)
            first += count
        token = token.index_select(0, order)
        factors = None if self.rows.factors is None else pairs[:, 1].index_select(0, order)
        made = ExpertRows(offs, token, first, factors, exchange, self.options)
        made.bags  # noqa: B018  while tokens travel
        return made

    def _ordered(self, ends: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(offsets of this rank's experts; for each row, sorted by expert, its position among the
        received ones, which lie rank after rank). ``ends``: of each sending rank."""
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
        self, x: Tensor, part: ExpertRows, applied: Any, begin: int, end: int | None = None
    ) -> Tensor:
        """x after the steps ``begin`` to ``end``, by default the last."""
        first, *_, last = *self._products, self._products[-1]
        for i, step in list(enumerate(self.steps))[begin:end]:
            if i not in self._products:
                x = applied(i, x)
                continue
            factors = part.factors if i == last else None
            x = ExpertProduct.apply(part, (i == first, i == last), x, step, factors)
        return x

    @cached_property
    def _products(self) -> list[int]:
        """The positions of weights among the steps."""
        return [i for i, s in enumerate(self.steps) if isinstance(s, torch.Tensor)]
