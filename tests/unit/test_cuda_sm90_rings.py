"""The synchronisation of Hopper's attention in Python: producer.h, consumer.h without arithmetic.

The producer thread and each consumer is a generator that yields the condition it waits for; which
one continues, and when a copy or an arrival completes, is random. The model detects deadlocks, a
stage that is read with another block's keys in it, and one that is written while it is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

Waits = Iterator[Callable[[], bool]]


class Barrier:
    """An mbarrier: a phase ends with its last arrival and its last announced byte."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = self.phase = 0

    def arrive(self, expect: int = 0) -> None:
        self.bytes += expect
        self.pending -= 1
        assert self.pending >= 0, "an arrival more than the phase has"
        self._turn()

    def landed(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if not self.pending and not self.bytes:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def completed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity


class Ring:
    """Stages: what is in them, and who reads."""

    def __init__(self, stages: int, returns: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(returns) for _ in range(stages)]
        self.holds: list[object] = [None] * stages
        self.readers = [0] * stages


@dataclass
class PipelineState:
    stages: int
    parity: int
    stage: int = 0

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.parity = 0, self.parity ^ 1


@dataclass
class Kernel:
    """A block. ``tiles``: per tile its blocks of keys, and each consumer's own number of them; 0:
    the tile has no rows for it."""

    tiles: list[tuple[int, list[int]]]
    early: bool
    turns: bool
    stages: int = 2
    groups: int = 2
    q_stages: int = 2
    random: random.Random = field(default_factory=lambda: random.Random(0))
    work_slots: int = 8
    """Work tiles kept in shared memory: block.h."""
    returns: int = 0
    """Arrivals that make a stage empty; 0: one a consumer."""
    first_parity: int = 1
    """Of the producer's pipeline states."""
    idle_turns: int = 1
    """Whether a consumer without rows takes its turns."""

    def __post_init__(self) -> None:
        returns = self.returns or self.groups
        self.k, self.v = Ring(self.stages, returns), Ring(self.stages, returns)
        self.q = [Ring(self.q_stages, 1) for _ in range(self.groups)]
        self.work_tiles: list[int | None] = [None] * self.work_slots
        self.turn = [0] * self.groups
        self.flying: list[Callable[[], None]] = []
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(self.groups)]

    # ---- the producer thread

    def load(self, ring: Ring, at: PipelineState, what: object) -> Waits:
        stage = at.stage
        yield ring.empty[stage].completed(at.parity)
        ring.full[stage].arrive(1)
        self.flying.append(lambda: self.land(ring, stage, what))
        at.advance()

    def land(self, ring: Ring, stage: int, what: object) -> None:
        assert not ring.readers[stage], f"{what} over {ring.holds[stage]}, which is being read"
        ring.holds[stage] = what
        ring.full[stage].landed(1)

    def producer(self) -> Waits:
        k, v, t = (
            PipelineState(self.stages, self.first_parity),
            PipelineState(self.stages, self.first_parity),
            0,
        )
        q = [PipelineState(self.q_stages, 1) for _ in range(self.groups)]

        def load_q(tile: int) -> Waits:
            for ring, at in zip(self.q, q, strict=True):
                yield from self.load(ring, at, tile)

        def load_k(tile: int, block: int) -> Waits:
            yield from self.load(self.k, k, (tile, block))

        def load_v(tile: int, block: int) -> Waits:
            yield from self.load(self.v, v, (tile, block))

        count = 0

        def next_tile() -> bool:
            nonlocal count
            if t >= len(self.tiles):
                return False
            self.work_tiles[count % self.work_slots] = t
            count += 1
            return True

        more = next_tile()
        if more:
            yield from load_k(t, self.tiles[t][0] - 1)
            yield from load_q(t)
        while more:
            tile, block = t, self.tiles[t][0] - 1
            t += 1

            def step(tile: int, block: int) -> Waits:
                yield from load_k(tile, block - 1)
                yield from load_v(tile, block)

            if self.early:
                if block > 0:
                    yield from step(tile, block)
                    block -= 1
                more = next_tile()
                if more:
                    yield from load_q(t)
            while block > 0:
                yield from step(tile, block)
                block -= 1
            if self.early and more:
                yield from load_k(t, self.tiles[t][0] - 1)
            yield from load_v(tile, block)
            if not self.early:
                more = next_tile()
                if more:
                    yield from load_k(t, self.tiles[t][0] - 1)
                    yield from load_q(t)
        self.work_tiles[count % self.work_slots] = None
        for ring, at in zip(self.q, q, strict=True):
            yield ring.empty[at.stage].completed(at.parity)
            ring.full[at.stage].arrive()

    # ---- a consumer

    def consumer(self, g: int) -> Waits:
        k, v, q = (
            PipelineState(self.stages, 0),
            PipelineState(self.stages, 0),
            PipelineState(self.q_stages, 0),
        )
        rings = {"k": self.k, "v": self.v}

        def full(name: str, at: PipelineState, what: object) -> Waits:
            ring = rings[name]
            yield ring.full[at.stage].completed(at.parity)
            assert ring.holds[at.stage] == what, (
                f"{name}: {ring.holds[at.stage]} in place of {what}"
            )

        def read(name: str, at: PipelineState, what: object) -> Waits:
            """A product runs: the stage must not change meanwhile."""
            ring, stage = rings[name], at.stage
            ring.readers[stage] += 1
            yield lambda: True
            assert ring.holds[stage] == what, f"{name}: {ring.holds[stage]} in place of {what}"
            ring.readers[stage] -= 1

        def release(name: str, at: PipelineState) -> None:
            self.flying.append(rings[name].empty[at.stage].arrive)
            at.advance()

        def scores(tile: int, block: int) -> Waits:
            """Q·Kᵀ of a block whose keys are full, then the wait for the next block's."""
            yield from read("k", k, (tile, block))
            self.seen[g].append((tile, block))
            release("k", k)
            if block == 0:
                self.flying.append(own_q.empty[q.stage].arrive)
            else:
                yield from full("k", k, (tile, block - 1))

        def scheduler_barrier_sync() -> Waits:
            if self.turns:
                yield lambda: self.turn[g] > 0
                self.turn[g] -= 1

        def scheduler_barrier_arrive() -> None:
            if self.turns:
                self.turn[1 - g] += 1

        own_q = self.q[g]
        if self.turns and g == 0:
            self.turn[0] += 1
        started, block, index, work_tiles = False, 0, 0, self.work_tiles
        yield own_q.full[0].completed(0)
        while (tile := work_tiles[index % self.work_slots]) is not None:
            end, own = self.tiles[tile]
            first = own[g] - 1
            idle = own[g] == 0
            if idle:
                for block in reversed(range(end)):
                    if block < end - 1 and self.idle_turns:
                        yield from scheduler_barrier_sync()
                        scheduler_barrier_arrive()
                    for name, at in (("k", k), ("v", v)):
                        yield from full(name, at, (tile, block))
                        release(name, at)
                self.flying.append(own_q.empty[q.stage].arrive)
                block = -1
            elif not started:
                block = end - 1
                while block > first:
                    for name, at in (("k", k), ("v", v)):
                        yield from full(name, at, (tile, block))
                        release(name, at)
                    block -= 1
                yield from full("k", k, (tile, block))
                yield from scores(tile, block)
                block -= 1
            while block >= 0:
                yield from scheduler_barrier_sync()
                yield from full("v", v, (tile, block + 1))
                scheduler_barrier_arrive()
                yield from scores(tile, block)
                yield from read("v", v, (tile, block + 1))
                release("v", v)
                block -= 1
            q.advance()
            if self.early:
                yield own_q.full[q.stage].completed(q.parity)
                following = work_tiles[(index + 1) % self.work_slots]
                started = (
                    following is not None
                    and self.tiles[following][1][g] == self.tiles[following][0]
                    and 0 not in own + self.tiles[following][1]
                )
                if started:
                    block = self.tiles[following][0] - 1
                    yield from full("k", k, (following, block))
                    yield from scheduler_barrier_sync()
                    yield from full("v", v, (tile, 0))
                    scheduler_barrier_arrive()
                    yield from scores(following, block)
                    block -= 1
                    yield from read("v", v, (tile, 0))
                    release("v", v)
                    index += 1
                    continue
            if not idle:
                yield from full("v", v, (tile, 0))
                yield from read("v", v, (tile, 0))
                release("v", v)
            index += 1
            if not self.early:
                yield own_q.full[q.stage].completed(q.parity)

    def run(self) -> None:
        roles = [self.producer(), *(self.consumer(g) for g in range(self.groups))]
        waiting: dict[int, Callable[[], bool]] = {i: (lambda: True) for i in range(len(roles))}
        while waiting:
            ready = [i for i, condition in waiting.items() if condition()]
            choice = (
                self.random.randrange(len(ready) + len(self.flying)) if ready or self.flying else -1
            )
            assert choice >= 0, f"all wait: roles {sorted(waiting)} of {len(roles)}"
            if choice < len(ready):
                i = ready[choice]
                try:
                    waiting[i] = next(roles[i])
                except StopIteration:
                    del waiting[i]
            else:
                self.flying.pop(choice - len(ready))()


def tiles(
    draw: random.Random, groups: int, turns: bool, causal: bool
) -> list[tuple[int, list[int]]]:
    """Each consumer's number of blocks: under a causal mask at most that of the one after, alike
    where they take turns; none of the last ones' in every third tile."""
    drawn = []
    for _ in range(draw.randrange(1, 20)):
        end = draw.randrange(1, 7)
        own, most = [end] * groups, end
        if causal and not turns:
            for i in reversed(range(groups)):
                own[i] = most
                most = max(most - draw.randrange(3), 1)
        if groups > 1 and draw.randrange(3) == 0:
            busy = draw.randrange(1, groups)
            own[busy:] = [0] * (groups - busy)
        drawn.append((end, own))
    return drawn


def run(
    seed: int,
    causal: bool,
    early: bool,
    turns: bool,
    groups: int,
    q_stages: int,
    stages: int,
    **bug: int,
) -> None:
    """A random launch: it ends, and every consumer reads its blocks, the last first."""
    draw = random.Random(seed)
    work = tiles(draw, groups, turns, causal)
    kernel = Kernel(work, early, turns, stages, groups, q_stages, draw, **bug)
    kernel.run()
    for g, seen in enumerate(kernel.seen):
        assert seen == [(t, b) for t, (_, own) in enumerate(work) for b in reversed(range(own[g]))]


@pytest.mark.parametrize(
    "way",
    [
        (True, True, 2, 2, 2),
        (False, True, 2, 1, 2),
        (False, False, 2, 1, 2),
        (True, False, 4, 2, 4),
        (True, False, 2, 2, 2),
    ],
    ids=lambda way: "early{:d}-turns{:d}-{}groups-{}queries-{}stages".format(*way),
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_role_deadlocks_and_none_reads_other_keys(
    way: tuple[bool, bool, int, int, int], causal: bool
) -> None:
    for seed in range(40):
        run(seed, causal, *way)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ({"returns": 1}, r"which is being read|in place of|^all wait: roles \[0, 1, 2\] of 3"),
        ({"first_parity": 0}, r"^all wait: roles \[0, 1, 2\] of 3"),
        ({"work_slots": 2}, r"^[kv]: \(\d+, \d+\) in place of"),
        ({"idle_turns": 0}, r"^all wait: roles \["),
    ],
    ids=[
        "one consumer empties a stage",
        "the producer waits for a phase before the first",
        "two work tiles are kept",
        "a consumer without rows takes no turns",
    ],
)
def test_the_model_finds_a_bug(bug: dict[str, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        for seed in range(40):
            run(seed, False, True, True, 2, 2, 2, **bug)
