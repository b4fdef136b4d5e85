"""What each method of a distributed attention would take: bytes over links, and products.

A step round the ring takes the longer of its products and its transfer, so that only the difference
is waited for; the products of a step are those of the rank that has most. All-gather and all-to-all
are not overlapped with anything. Only the forward is predicted: gradients send twice to four times
as much and multiply 2.5 times as much, which leaves the order of the methods as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from kernelseam.arrays import describe
from kernelseam.costs.roofline import peak
from kernelseam.descriptors.common.validation import MAX_EXTENT, extent, finite, positive
from kernelseam.distributed import heads
from kernelseam.distributed.order import Run, runs
from kernelseam.distributed.plan import Mask, parts, reach, seen
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

_ATTAINED = 0.6
"""Of a device's peak, by attention."""
_SAMPLED = 8
"""Ranks whose products are counted, where there are more."""


@dataclass(frozen=True)
class Machine:
    """What a rank has. Rates are per second and rank, in bytes each way and operations."""

    products: float
    """Multiplications and additions that an attention attains."""
    within: float = 450e9
    """Bytes to ranks of the same host."""
    between: float = 50e9
    """Bytes to ranks of another."""
    latency: float = 1e-5
    """Seconds of a transfer that are not due to its bytes."""
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("products", "within", "between"):
            positive(name, getattr(self, name), "Give a rate per second")
        if finite("latency", self.latency) < 0:
            raise InvalidValue("latency", self.latency, "must not be negative", "Give seconds")
        extent("ranks_per_host", self.ranks_per_host, 1)


@lru_cache(maxsize=16)
def machine_of(device: Any, dtype: Any = torch.bfloat16) -> Machine:
    """The rates of a tensor's device as its plugin knows them, links by default: a host's processes
    over shared memory at 2 GB/s, other devices at 450 GB/s within a host and 50 GB/s between. How
    many ranks a host has is torchrun's LOCAL_WORLD_SIZE, else all."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or str(MAX_EXTENT)
    try:
        ranks = int(given)
    except ValueError:
        raise InvalidValue(
            "LOCAL_WORLD_SIZE", given, "must be a number of ranks", "Set it as torchrun does"
        ) from None
    if device.type == "meta":
        return Machine(_ATTAINED * 1e15, ranks_per_host=ranks)
    info = describe(torch.zeros(1, device=device), "q").device
    name = str(dtype).removeprefix("torch.")
    rate = _ATTAINED * peak(info.limits, DType.of(name))
    if device.type == "cpu":
        return Machine(rate, 2e9, 1e9, 1e-4, ranks)
    return Machine(rate, ranks_per_host=ranks)


@dataclass(frozen=True)
class Sizes:
    """Extents of a rank's operands."""

    batch: int
    heads: int
    kv_heads: int
    rows_q: int
    rows_k: int
    dim: int
    value_dim: int
    itemsize: int

    @classmethod
    def of(cls, q: Any, k: Any, v: Any) -> Sizes:
        batch, heads_q, rows, dim = q.shape
        return cls(batch, heads_q, k.shape[1], rows, k.shape[2], dim, v.shape[3], q.element_size())


@dataclass(frozen=True)
class Candidate:
    """One method, with the ranks that share heads, and what is expected of it."""

    method: str
    heads: int
    seconds: float = math.inf
    products: float = 0.0
    """Seconds of them."""
    waiting: float = 0.0
    """Seconds in which nothing is multiplied."""
    sent: int = 0
    """Bytes by rank."""
    held: int = 0
    """Bytes of K and V that a rank holds at once."""
    refusal: str = ""

    def __str__(self) -> str:
        name = f"mesh:{self.heads}" if self.method == "mesh" else self.method
        if self.refusal:
            return f"{name:10} refused: {self.refusal}"
        return (
            f"{name:10} {self.seconds * 1e3:10.3f} ms: products {self.products * 1e3:.3f} ms, "
            f"waiting {self.waiting / self.seconds if self.seconds else 0:.0%}, sends "
            f"{self.sent / 1e6:.1f} MB, holds {self.held / 1e6:.1f} MB of K and V"
        )


@dataclass(frozen=True)
class Explanation:
    """What "auto" weighed; as text, a line for each method, the chosen first."""

    candidates: tuple[Candidate, ...]
    machine: Machine

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def __str__(self) -> str:
        return "\n".join(map(str, self.candidates))


def widest(heads_q: int, kv_heads: int, size: int) -> int:
    """How many neighbours share heads on a mesh: as many as can, not all ranks where there is
    another way."""
    some = (u for u in range(1, size) if size % u == 0)
    return max((u for u in some if not heads.misfit(heads_q, kv_heads, u)), default=1)


@lru_cache(maxsize=256)
def explain(sizes: Sizes, mask: Mask, size: int, balanced: bool, machine: Machine) -> Explanation:
    """All methods, the fastest first; on a tie the one that holds less, then the ring."""
    result = [*_candidates(sizes, mask, size, balanced, machine)]
    order = sorted(
        range(len(result)),
        key=lambda i: (bool(result[i].refusal), round(result[i].seconds, 12), result[i].held, i),
    )
    return Explanation(tuple(result[i] for i in order), machine)


def _candidates(
    s: Sizes, mask: Mask, size: int, balanced: bool, machine: Machine
) -> Iterator[Candidate]:
    yield _ring("ring", s, mask, size, 1, balanced, machine)
    if size == 1:
        return
    yield _gathered(s, mask, size, balanced, machine)
    for shared in range(2, size + 1):
        if size % shared:
            continue
        name = "ulysses" if shared == size else "mesh"
        problem = heads.misfit(s.heads, s.kv_heads, shared)
        if problem is None:
            yield _ring(name, s, mask, size, shared, balanced, machine)
        else:
            yield Candidate(name, shared, refusal=f"{problem.field} {problem.rule}")


def _places(size: int) -> Iterator[int]:
    yield from range(0, size, max(1, size // _SAMPLED))
    if size > _SAMPLED:
        yield size - 1


def _seconds_of(s: Sizes, pairs: int, heads_q: int, machine: Machine) -> float:
    return 2.0 * s.batch * heads_q * pairs * (s.dim + s.value_dim) / machine.products


def _link(machine: Machine, span: int) -> float:
    return machine.within if span <= machine.ranks_per_host else machine.between


def _ring(
    name: str, s: Sizes, mask: Mask, size: int, shared: int, balanced: bool, machine: Machine
) -> Candidate:
    blocks = size // shared
    heads_q, kv_heads = s.heads // shared, max(1, s.kv_heads // shared)
    held = s.batch * kv_heads * s.rows_k * shared * (s.dim + s.value_dim) * s.itemsize
    passing = held / _link(machine, size) + machine.latency
    steps = max(reach(mask, blocks, balanced)) + 1
    of_q, of_k = (
        [runs(i, blocks, rows, balanced) for i in range(blocks)]
        for rows in (mask.rows_q, mask.rows_k)
    )
    products = waiting = 0.0
    for t in range(steps):
        pairs = max(
            sum(map(seen, parts(mask, of_q[r], of_k[(r - t) % blocks]))) for r in _places(blocks)
        )
        busy = _seconds_of(s, pairs, heads_q, machine)
        products += busy
        waiting += max(0.0, passing - busy) if t + 1 < steps else 0.0
    sent = held * (steps - 1)
    if shared > 1:
        rows = s.batch * (
            s.heads * s.rows_q * (s.dim + s.value_dim)
            + max(s.kv_heads, shared) * s.rows_k * (s.dim + s.value_dim)
        )
        moved = rows * s.itemsize * (shared - 1) // shared
        waiting += moved / _link(machine, shared) + 2 * machine.latency
        sent += moved
    buffers = 1 if steps == 1 else 2
    return Candidate(name, shared, products + waiting, products, waiting, sent, buffers * held)


def _gathered(s: Sizes, mask: Mask, size: int, balanced: bool, machine: Machine) -> Candidate:
    one = s.batch * s.kv_heads * s.rows_k * (s.dim + s.value_dim) * s.itemsize
    whole = (Run(0, mask.rows_k),)
    pairs = max(
        sum(map(seen, parts(mask, runs(r, size, mask.rows_q, balanced), whole)))
        for r in _places(size)
    )
    products = _seconds_of(s, pairs, s.heads, machine)
    sent = one * (size - 1)
    # What arrives is copied once into the order of the whole.
    waiting = sent / _link(machine, size) + math.ceil(math.log2(size)) * machine.latency
    return Candidate("all_gather", 1, products + waiting, products, waiting, sent, 2 * one * size)
