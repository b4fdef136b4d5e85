"""Ring attention: K and V pass round the ranks, and in the backward their gradients follow them.

At step t, the rank at place r has the keys of place r − t. They are sent on, and the next received
into the other of two buffers, while the queries use those at hand. Keys go as far as anyone sees
them: with a window, some steps. In the backward, dK and dV of the keys at hand follow one step
later: the sum of the ranks before is received during the step, this rank's share is added, and the
sum goes on, from the last rank that sees the keys straight back to their owner, which has kept its
own share. Of that share a portion is computed at the end, while the sums are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kernelseam.distributed import pieces
from kernelseam.distributed.order import runs
from kernelseam.distributed.partials import deepest, wider
from kernelseam.distributed.pieces import Options, add_gradients
from kernelseam.distributed.plan import Mask, Part, opening_and_closing, parts, reach
from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.sums import Sum
from kernelseam.distributed.transfers import Transfer, exchange
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

Tensor = Any
_KEYS, _SUMS = 0, 1
"""Tags of the transfers: keys with values, and sums of their gradients."""


@dataclass(frozen=True, eq=False)
class Ring:
    """Which ranks see whose keys, and how far these travel."""

    axis: Axis
    mask: Mask
    balanced: bool

    def source(self, step: int) -> int:
        """The place whose keys are at hand at a step."""
        return (self.axis.index - step) % self.axis.size

    def parts(self, step: int) -> tuple[Part, ...]:
        return self._parts(self.axis.index, step)

    def _parts(self, place: int, step: int) -> tuple[Part, ...]:
        size, mask = self.axis.size, self.mask
        return parts(
            mask,
            runs(place % size, size, mask.rows_q, self.balanced),
            runs((place - step) % size, size, mask.rows_k, self.balanced),
        )

    def sums_dtype(self, place: int, step: int, dtype: Any) -> Any:
        """The dtype of the sums of dK and dV that leave a place after a step: their own dtype if
        the place is the first to add, and adds once to each row, since nothing is lost then; else
        that of sums."""
        once = deepest((p.key, p.n) for p in self._parts(place, 1)) <= 1
        return dtype if step == 1 and once else wider(dtype)

    def of_no_document(self, device: Any) -> Tensor | None:
        """bool [S_q]: this rank's rows before the first packed document or after the last; None
        where there are none."""
        offsets, rows = self.mask.documents, self.mask.rows_q
        if offsets is None or (offsets[0], offsets[-1]) == (0, rows):
            return None
        own = runs(self.axis.index, self.axis.size, rows, self.balanced)
        row = torch.cat([torch.arange(r.start, r.stop, device=device) for r in own])
        return (row < offsets[0]) | (row >= offsets[-1])

    def arrives(self, step: int) -> bool:
        """Whether keys are at hand at this step."""
        return step <= self._reach[self.source(step)]

    def goes_on(self, step: int) -> bool:
        """Whether the keys at hand are sent on after this step."""
        return step < self._reach[self.source(step)]

    def steps(self) -> int:
        """The number of steps until no keys arrive anywhere."""
        return max(self._reach) + 1

    def reach(self, source: int) -> int:
        return self._reach[source]

    @cached_property
    def seen(self) -> tuple[Part, ...]:
        """The parts of all steps."""
        return tuple(p for t in range(self.steps()) if self.arrives(t) for p in self.parts(t))

    @cached_property
    def _reach(self) -> tuple[int, ...]:
        return reach(self.mask, self.axis.size, self.balanced)

    def named(self, what: str, step: int) -> str:
        return (
            f"ring attention on rank {self.axis.index} of {self.axis.size}, step {step + 1} of "
            f"{self.steps()}: {what}"
        )


class _Keys:
    """K and V of one rank at a time, in one of two buffers."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._k, self._v = ring, k, v
        self._at_hand: Tensor | None = None
        self._free: Tensor | None = None
        if ring.goes_on(0):
            self._at_hand = torch.cat([k.reshape(-1), v.reshape(-1)])

    def pass_on(self, step: int) -> Transfer:
        """Send the keys at hand, and receive those of the next step."""
        ring = self._ring
        sends, receives = [], []
        if ring.goes_on(step):
            assert self._at_hand is not None
            sends.append((self._at_hand, ring.axis.index + 1))
        self._next = None
        if step + 1 < ring.steps() and ring.arrives(step + 1):
            if self._free is None:
                self._free = self._k.new_empty(self._k.numel() + self._v.numel())
            self._next = self._free
            receives.append((self._next, ring.axis.index - 1))
        return exchange(ring.axis, sends, receives, ring.named("keys and values", step), _KEYS)

    def swap(self) -> None:
        """Swap the buffers: the received keys are at hand, and the sent ones may be overwritten."""
        self._free, self._at_hand = self._at_hand, self._next

    def views(self, step: int) -> tuple[Tensor, Tensor]:
        if step == 0:
            return self._k, self._v
        assert self._at_hand is not None
        split = self._k.numel()
        return (
            self._at_hand[:split].view(self._k.shape),
            self._at_hand[split:].view(self._v.shape),
        )


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(result, LSE) of this rank's queries over all keys."""

    def at_hand() -> Iterator[tuple[Tensor, Tensor, Sequence[Part]]]:
        keys = _Keys(ring, k, v)
        for step in range(ring.steps()):
            transfer = keys.pass_on(step)
            if ring.arrives(step):
                yield *keys.views(step), ring.parts(step)
            transfer.wait()
            keys.swap()

    return pieces.forward(q, at_hand(), ring.seen, v.shape[-1], options)


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
    axis, keys, dq = ring.axis, _Keys(ring, k, v), Sum(q)
    kept = Sum(k), Sum(v)  # of this rank's own keys
    home: list[Tensor] = []  # the others' parts
    coming: Transfer | None = None
    arriving: list[Tensor] = []
    busy: list[Transfer] = []
    only = ring.steps() == 1
    opening, closing = (ring.parts(0), ()) if only else opening_and_closing(ring.parts(0))

    def add(own: tuple[Sum, Sum], k: Tensor, v: Tensor, parts: tuple[Part, ...]) -> None:
        add_gradients((dq, *own), given, q, k, v, out, lse, parts, options)

    def receive(place: int, step: int) -> list[Tensor]:
        dtype = ring.sums_dtype(place, step, k.dtype)
        return [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v)]

    for step in range(ring.steps()):
        transfer = keys.pass_on(step)
        own: tuple[Sum, Sum] | None = None
        if ring.arrives(step):
            own = (Sum(k), Sum(v)) if step else kept
            add(own, *keys.views(step), ring.parts(step) if step else opening)
        if coming is not None:
            coming.wait()
            for i, x in enumerate(arriving):
                assert own is not None
                own[i].add(0, x)
        for sent in busy:
            sent.wait()
        busy, sends, receives = [], [], []
        arriving, summed = [], list[Tensor]()
        if step and own is not None:
            dtype = ring.sums_dtype(axis.index, step, k.dtype)
            summed = [x.result(dtype) for x in own]
        if ring.goes_on(step):
            sends += [(x, axis.index + 1) for x in summed]
        if step and step + 1 < ring.steps() and ring.arrives(step + 1):
            arriving = receive(axis.index - 1, step)
            receives += [(x, axis.index - 1) for x in arriving]
        coming = exchange(axis, sends, receives, ring.named("sums of dK and dV", step), _SUMS)
        # Then, from the last that sees them, sums go home.
        sends, receives = [], []
        if not ring.goes_on(step):
            sends += [(x, ring.source(step)) for x in summed]
        if step and ring.reach(axis.index) == step:
            home = receive(axis.index + step, step)
            receives += [(x, axis.index + step) for x in home]
        busy.append(exchange(axis, sends, receives, ring.named("dK and dV back", step), _SUMS))
        transfer.wait()
        keys.swap()
    add(kept, k, v, closing)
    if coming is not None:
        coming.wait()
    for sent in busy:
        sent.wait()
    for i, x in enumerate(home):
        kept[i].add(0, x)
    return dq.result(q.dtype), kept[0].result(k.dtype), kept[1].result(v.dtype)
