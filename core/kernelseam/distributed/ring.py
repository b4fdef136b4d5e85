"""K and V pass round the ranks, and the gradients of both with them.

At step t, the rank at place r has the keys of place r − t. They are sent on, and the next received
into the other of two buffers, while the queries look at those at hand. Keys go as far as anyone
sees them: with a window, some steps. In the gradients, dK and dV of the keys at hand come after
them: what the ranks before have summed is received during the step, this rank's part is added, and
the sum goes on, from the last that sees the keys straight back to the rank they belong to, which
has kept its own part. Of that, a portion is computed at the end, while the sums are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernelseam.distributed.order import runs
from kernelseam.distributed.pieces import (
    Options,
    State,
    add_gradients,
    add_parts,
    wider,
)
from kernelseam.distributed.plan import Mask, Part, opening_and_closing, parts, reach
from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.transfers import Transfer, exchange

Tensor = Any
_KEYS, _SUMS = 0, 1
"""Tags of what goes round: keys with values, and sums of their gradients."""


@dataclass(frozen=True, eq=False)
class Ring:
    """Who sees whose keys, and how far they go."""

    axis: Axis
    mask: Mask
    balanced: bool

    def source(self, step: int) -> int:
        """Whose keys are at hand."""
        return (self.axis.index - step) % self.axis.size

    def parts(self, step: int) -> tuple[Part, ...]:
        size = self.axis.size
        return parts(
            self.mask,
            runs(self.axis.index, size, self.mask.rows_q, self.balanced),
            runs(self.source(step), size, self.mask.rows_k, self.balanced),
        )

    def of_no_document(self, device: Any) -> Tensor | None:
        """Which of this rank's rows lie before the first packed document or after the last, bool
        [S_q]; None where none does."""
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
        """Whether those at hand are sent on after it."""
        return step < self._reach[self.source(step)]

    def steps(self) -> int:
        """How many there are until no keys arrive anywhere."""
        return max(self._reach) + 1

    def reach(self, source: int) -> int:
        return self._reach[source]

    @property
    def _reach(self) -> tuple[int, ...]:
        return reach(self.mask, self.axis.size, self.balanced)

    def named(self, what: str, step: int) -> str:
        return (
            f"ring attention on rank {self.axis.index} of {self.axis.size}, step {step + 1} of "
            f"{self.steps()}: {what}"
        )


class _Keys:
    """K and V of one rank at a time, one after the other in one buffer."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._ring, self._k, self._v = ring, k, v
        self._at_hand: Tensor | None = None
        self._free: Tensor | None = None
        if ring.goes_on(0):
            self._at_hand = torch.cat([k.reshape(-1), v.reshape(-1)])

    def pass_on(self, step: int) -> Transfer:
        """Send what is at hand at the step, and receive what will be at the next."""
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

    def turn(self) -> None:
        """What was received is at hand; what was sent may be written."""
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


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
    """The state of this rank's queries over all keys."""
    state = State((*q.shape[:-1], v.shape[-1]), q)
    keys = _Keys(ring, k, v)
    for step in range(ring.steps()):
        transfer = keys.pass_on(step)
        if ring.arrives(step):
            only = ring.steps() == 1
            add_parts(state, q, *keys.views(step), ring.parts(step), options, last=only)
        transfer.wait()
        keys.turn()
    return state


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
    dq = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
    split, size = k.numel(), k.numel() + v.numel()
    keys = _Keys(ring, k, v)
    kept = k.new_zeros(0)  # this rank's part of its own keys' gradients
    home: Tensor | None = None  # the others' parts
    coming: Transfer | None = None
    arriving: Tensor | None = None
    busy: list[Transfer] = []
    only = ring.steps() == 1
    opening, closing = (ring.parts(0), ()) if only else opening_and_closing(ring.parts(0))

    def add(own: Tensor, k: Tensor, v: Tensor, parts: tuple[Part, ...]) -> None:
        """``own``: the sums of dK and dV."""
        dk, dv = own[:split].view(k.shape), own[split:].view(v.shape)
        add_gradients((dq, dk, dv), given, q, k, v, out, lse, parts, options)

    for step in range(ring.steps()):
        transfer = keys.pass_on(step)
        own: Tensor | None = None
        if ring.arrives(step):
            own = k.new_zeros(size, dtype=wide)
            add(own, *keys.views(step), ring.parts(step) if step else opening)
        if coming is not None:
            coming.wait()
            if arriving is not None:
                assert own is not None
                own += arriving
        for sent in busy:
            sent.wait()
        busy, sends, receives = [], [], []
        arriving = None
        if step == 0:
            assert own is not None
            kept, own = own, None
        if own is not None and ring.goes_on(step):
            sends.append((own, axis.index + 1))
        if step and step + 1 < ring.steps() and ring.arrives(step + 1):
            arriving = k.new_empty(size, dtype=wide)
            receives.append((arriving, axis.index - 1))
        coming = exchange(axis, sends, receives, ring.named("sums of dK and dV", step), _SUMS)
        # Then, from the last that sees them, sums go home.
        sends, receives = [], []
        if own is not None and not ring.goes_on(step):
            sends.append((own, ring.source(step)))
        if step and ring.reach(axis.index) == step:
            home = k.new_empty(size, dtype=wide)
            receives.append((home, axis.index + step))
        busy.append(exchange(axis, sends, receives, ring.named("dK and dV back", step), _SUMS))
        transfer.wait()
        keys.turn()
    add(kept, k, v, closing)
    if coming is not None:
        coming.wait()
    for sent in busy:
        sent.wait()
    if home is not None:
        kept += home
    return dq, kept[:split].view(k.shape), kept[split:].view(v.shape)
