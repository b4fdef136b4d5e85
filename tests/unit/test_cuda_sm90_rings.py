"""Hopper's attention as its roles wait for each other, in Python: producer.h and consumer.h without
arithmetic.

A block's loading thread and each of its consumers is a generator that yields what it waits for;
which one goes on, and when a copy or an arrival lands, is drawn at random. Found are waits without
end, a stage that is read with another block's keys in it, and one that is written while somebody
reads it.
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

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase % 2 != parity


class Ring:
    """Stages: what is in them, and who reads."""

    def __init__(self, stages: int, returns: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(returns) for _ in range(stages)]
        self.holds: list[object] = [None] * stages
        self.readers = [0] * stages


@dataclass
class Cursor:
    stages: int
    parity: int
    stage: int = 0

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.parity = 0, self.parity ^ 1


@dataclass
class Kernel:
    """A block. ``tiles``: per tile its blocks of keys, and each consumer's own number of them."""

    tiles: list[tuple[int, list[int]]]
    early: bool
    turns: bool
    stages: int = 2
    groups: int = 2
    q_stages: int = 2
    random: random.Random = field(default_factory=lambda: random.Random(0))
    known: int = 8
    """Tiles whose coordinates are kept: block.h."""
    returns: int = 0
    """Consumers that make a stage empty; 0: all."""
    first_parity: int = 1
    """Of the loading thread's cursors."""

    def __post_init__(self) -> None:
        returns = self.returns or self.groups
        self.k, self.v = Ring(self.stages, returns), Ring(self.stages, returns)
        self.q = [Ring(self.q_stages, 1) for _ in range(self.groups)]
        self.works: list[int | None] = [None] * self.known
        self.turn = [0] * self.groups
        self.flying: list[Callable[[], None]] = []
        self.seen: list[list[tuple[int, int]]] = [[] for _ in range(self.groups)]

    # ---- the loading thread

    def load(self, ring: Ring, at: Cursor, what: object) -> Waits:
        stage = at.stage
        yield ring.empty[stage].passed(at.parity)
        ring.full[stage].arrive(1)
        self.flying.append(lambda: self.land(ring, stage, what))
        at.advance()

    def land(self, ring: Ring, stage: int, what: object) -> None:
        assert not ring.readers[stage], f"{what} over {ring.holds[stage]}, which is being read"
        ring.holds[stage] = what
        ring.full[stage].landed(1)

    def producer(self) -> Waits:
        k, v, t = Cursor(self.stages, self.first_parity), Cursor(self.stages, self.first_parity), 0
        q = [Cursor(self.q_stages, 1) for _ in range(self.groups)]

        def load_q(tile: int) -> Waits:
            for ring, at in zip(self.q, q, strict=True):
                yield from self.load(ring, at, tile)

        def load_k(tile: int, block: int) -> Waits:
            yield from self.load(self.k, k, (tile, block))

        def load_v(tile: int, block: int) -> Waits:
            yield from self.load(self.v, v, (tile, block))

        found = 0

        def find() -> bool:
            nonlocal found
            if t >= len(self.tiles):
                return False
            self.works[found % self.known] = t
            found += 1
            return True

        more = find()
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
                more = find()
                if more:
                    yield from load_q(t)
            while block > 0:
                yield from step(tile, block)
                block -= 1
            if self.early and more:
                yield from load_k(t, self.tiles[t][0] - 1)
            yield from load_v(tile, block)
            if not self.early:
                more = find()
                if more:
                    yield from load_k(t, self.tiles[t][0] - 1)
                    yield from load_q(t)
        self.works[found % self.known] = None
        for ring, at in zip(self.q, q, strict=True):
            yield ring.empty[at.stage].passed(at.parity)
            ring.full[at.stage].arrive()

    # ---- a consumer

    def consumer(self, g: int) -> Waits:
        k, v, q = Cursor(self.stages, 0), Cursor(self.stages, 0), Cursor(self.q_stages, 0)
        rings = {"k": self.k, "v": self.v}

        def full(name: str, at: Cursor, what: object) -> Waits:
            ring = rings[name]
            yield ring.full[at.stage].passed(at.parity)
            assert ring.holds[at.stage] == what, (
                f"{name}: {ring.holds[at.stage]} in place of {what}"
            )

        def read(name: str, at: Cursor, what: object) -> Waits:
            """A product runs: the stage must not change meanwhile."""
            ring, stage = rings[name], at.stage
            ring.readers[stage] += 1
            yield lambda: True
            assert ring.holds[stage] == what, f"{name}: {ring.holds[stage]} in place of {what}"
            ring.readers[stage] -= 1

        def release(name: str, at: Cursor) -> None:
            self.flying.append(rings[name].empty[at.stage].arrive)
            at.advance()

        def my_turn() -> Waits:
            if self.turns:
                yield lambda: self.turn[g] > 0
                self.turn[g] -= 1

        def next_turn() -> None:
            if self.turns:
                self.turn[1 - g] += 1

        own_q = self.q[g]
        if self.turns and g == 0:
            self.turn[0] += 1
        started, block, index, works = False, 0, 0, self.works
        yield own_q.full[0].passed(0)
        while (tile := works[index % self.known]) is not None:
            end, own = self.tiles[tile]
            first = own[g] - 1
            if not started:
                block = end - 1
                while block > first:
                    for name, at in (("k", k), ("v", v)):
                        yield from full(name, at, (tile, block))
                        release(name, at)
                    block -= 1
                yield from full("k", k, (tile, block))
                yield from read("k", k, (tile, block))
                self.seen[g].append((tile, block))
                release("k", k)
                if block == 0:
                    self.flying.append(own_q.empty[q.stage].arrive)
                block -= 1
                if block >= 0:
                    yield from full("k", k, (tile, block))
            while block >= 0:
                yield from my_turn()
                yield from full("v", v, (tile, block + 1))
                next_turn()
                yield from read("k", k, (tile, block))
                self.seen[g].append((tile, block))
                release("k", k)
                if block == 0:
                    self.flying.append(own_q.empty[q.stage].arrive)
                if block > 0:
                    yield from full("k", k, (tile, block - 1))
                yield from read("v", v, (tile, block + 1))
                release("v", v)
                block -= 1
            q.advance()
            if self.early:
                yield own_q.full[q.stage].passed(q.parity)
                following = works[(index + 1) % self.known]
                started = (
                    following is not None
                    and self.tiles[following][1][g] == self.tiles[following][0]
                )
                if started:
                    block = self.tiles[following][0] - 1
                    yield from full("k", k, (following, block))
                    yield from my_turn()
                    yield from full("v", v, (tile, 0))
                    next_turn()
                    yield from read("k", k, (following, block))
                    self.seen[g].append((following, block))
                    release("k", k)
                    if block == 0:
                        self.flying.append(own_q.empty[q.stage].arrive)
                    block -= 1
                    if block >= 0:
                        yield from full("k", k, (following, block))
                    yield from read("v", v, (tile, 0))
                    release("v", v)
                    index += 1
                    continue
            yield from full("v", v, (tile, 0))
            yield from read("v", v, (tile, 0))
            release("v", v)
            index += 1
            if not self.early:
                yield own_q.full[q.stage].passed(q.parity)

    def run(self) -> None:
        roles = [self.producer(), *(self.consumer(g) for g in range(self.groups))]
        waiting: dict[int, Callable[[], bool]] = {i: (lambda: True) for i in range(len(roles))}
        while waiting:
            ready = [i for i, passed in waiting.items() if passed()]
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
    where they take turns."""
    found = []
    for _ in range(draw.randrange(1, 20)):
        end = draw.randrange(1, 7)
        own, most = [end] * groups, end
        if causal and not turns:
            for i in reversed(range(groups)):
                own[i] = most
                most = max(most - draw.randrange(3), 1)
        found.append((end, own))
    return found


def run(
    seed: int,
    causal: bool,
    early: bool,
    turns: bool,
    groups: int,
    q_stages: int,
    stages: int,
    **planted: int,
) -> None:
    """A launch by chance: it ends, and every consumer saw its own blocks, from the last to the
    first."""
    draw = random.Random(seed)
    work = tiles(draw, groups, turns, causal)
    kernel = Kernel(work, early, turns, stages, groups, q_stages, draw, **planted)
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
def test_no_role_waits_for_ever_and_none_reads_anothers_keys(
    way: tuple[bool, bool, int, int, int], causal: bool
) -> None:
    for seed in range(40):
        run(seed, causal, *way)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"returns": 1}, r"which is being read|in place of|^all wait: roles \[0, 1, 2\] of 3"),
        ({"first_parity": 0}, r"^all wait: roles \[0, 1, 2\] of 3"),
        ({"known": 2}, r"^v: \(\d+, \d+\) in place of"),
    ],
    ids=[
        "one consumer empties a stage",
        "loads wait for a turn that never was",
        "coordinates of two tiles",
    ],
)
def test_the_model_finds_a_bug(planted: dict[str, int], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        for seed in range(40):
            run(seed, False, True, True, 2, 2, 2, **planted)
