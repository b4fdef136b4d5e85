"""Hopper's attention as its roles wait for each other, in Python: producer.h and consumer.h without arithmetic.

A block's loading thread and each of its consumers is a generator that yields what it waits for; which one goes on, and
when a copy or an arrival lands, is drawn at random. Found are waits without end, a stage that is read with another
block's keys in it, and one that is written while somebody reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

KNOWN = 8
"""Tiles whose coordinates are kept: block.h."""
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
    """Stages of one block: what is in them, and who reads."""

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
    """``tiles``: per tile the blocks of keys of a cluster's tiles, and each consumer's own number of them."""

    tiles: list[tuple[int, list[list[int]]]]
    cluster: int
    early: bool
    turns: bool
    stages: int = 2
    groups: int = 2
    q_stages: int = 2
    to_all: bool = True
    """Whether a stage is handed back to all blocks of the cluster."""
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        blocks, returns = range(self.cluster), self.groups * (self.cluster if self.to_all else 1)
        self.k, self.v = ([Ring(self.stages, returns) for _ in blocks] for _ in range(2))
        self.q = [[Ring(self.q_stages, 1) for _ in range(self.groups)] for _ in blocks]
        self.told, self.heard = [Barrier(1) for _ in blocks], [Barrier(max(self.cluster - 1, 1)) for _ in blocks]
        self.next = [-1] * self.cluster
        self.works: list[list[int | None]] = [[None] * KNOWN for _ in blocks]
        self.turn = [[0] * self.groups for _ in blocks]
        self.counter = 0
        self.flying: list[Callable[[], None]] = []
        self.seen: dict[tuple[int, int], list[tuple[int, int]]] = {
            (r, g): [] for r in blocks for g in range(self.groups)
        }

    # ---- the loading thread

    def load(self, rings: list[Ring], rank: int, at: Cursor, what: object) -> Waits:
        """One block's part of a stage, into all blocks of the cluster."""
        yield rings[rank].empty[at.stage].passed(at.parity)
        rings[rank].full[at.stage].arrive(self.cluster)
        for ring in rings:
            self.flying.append(lambda ring=ring, stage=at.stage: self.land(ring, stage, what))
        at.advance()

    def land(self, ring: Ring, stage: int, what: object) -> None:
        assert not ring.readers[stage], f"{what} over {ring.holds[stage]}, which is being read"
        ring.holds[stage] = what
        ring.full[stage].landed(1)

    def find_next(self, rank: int, parity: int) -> Waits:
        if rank == 0:
            t, self.counter = self.counter, self.counter + 1
            if self.cluster > 1:
                yield self.heard[0].passed(parity ^ 1)
                for r in range(1, self.cluster):
                    self.flying.append(lambda r=r: self.tell(r, t))
            self.next[0] = t
            return
        self.told[rank].arrive(1)
        yield self.told[rank].passed(parity)
        self.flying.append(self.heard[0].arrive)

    def tell(self, rank: int, t: int) -> None:
        self.next[rank] = t
        self.told[rank].landed(1)

    def producer(self, rank: int) -> Waits:
        k, v, parity, t = Cursor(self.stages, 1), Cursor(self.stages, 1), 0, -1
        q = [Cursor(self.q_stages, 1) for _ in range(self.groups)]

        def load_q(tile: int) -> Waits:
            for g in range(self.groups):
                at = q[g]
                yield self.q[rank][g].empty[at.stage].passed(at.parity)
                self.q[rank][g].full[at.stage].arrive(1)
                ring = self.q[rank][g]
                self.flying.append(lambda ring=ring, stage=at.stage: self.land(ring, stage, tile))
                at.advance()

        def load_k(tile: int, block: int) -> Waits:
            yield from self.load(self.k, rank, k, (tile, block))

        def load_v(tile: int, block: int) -> Waits:
            yield from self.load(self.v, rank, v, (tile, block))

        found = 0

        def find() -> bool:
            nonlocal found
            if t >= len(self.tiles):
                return False
            self.works[rank][found % KNOWN] = t
            found += 1
            return True

        # The first tile is a cluster's own; it is the counter's first here.
        yield from self.find_next(rank, parity)
        parity, t = parity ^ 1, self.next[rank]
        more = find()
        if more:
            yield from load_k(t, self.tiles[t][0] - 1)
            yield from load_q(t)
        while more:
            tile, block = t, self.tiles[t][0] - 1
            yield from self.find_next(rank, parity)
            parity, t = parity ^ 1, self.next[rank]

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
        self.works[rank][found % KNOWN] = None
        for g in range(self.groups):
            at = q[g]
            yield self.q[rank][g].empty[at.stage].passed(at.parity)
            self.q[rank][g].full[at.stage].arrive()

    # ---- a consumer

    def consumer(self, rank: int, g: int) -> Waits:
        k, v, q = Cursor(self.stages, 0), Cursor(self.stages, 0), Cursor(self.q_stages, 0)
        rings = {"k": self.k, "v": self.v}

        def full(name: str, at: Cursor, what: object) -> Waits:
            ring = rings[name][rank]
            yield ring.full[at.stage].passed(at.parity)
            assert ring.holds[at.stage] == what, f"{name}: {ring.holds[at.stage]} in place of {what}"

        def read(name: str, at: Cursor, what: object) -> Waits:
            """A product runs: the stage must not change meanwhile."""
            ring, stage = rings[name][rank], at.stage
            ring.readers[stage] += 1
            yield lambda: True
            assert ring.holds[stage] == what, f"{name}: {ring.holds[stage]} in place of {what}"
            ring.readers[stage] -= 1

        def release(name: str, at: Cursor) -> None:
            for ring in rings[name] if self.to_all else [rings[name][rank]]:
                self.flying.append(ring.empty[at.stage].arrive)
            at.advance()

        def my_turn() -> Waits:
            if self.turns:
                yield lambda: self.turn[rank][g] > 0
                self.turn[rank][g] -= 1

        def next_turn() -> None:
            if self.turns:
                self.turn[rank][1 - g] += 1

        own_q = self.q[rank][g]
        if self.turns and g == 0:
            self.turn[rank][0] += 1
        started, block, index, works = False, 0, 0, self.works[rank]
        yield own_q.full[0].passed(0)
        while (tile := works[index % KNOWN]) is not None:
            end, own = self.tiles[tile]
            first = own[rank][g] - 1
            if not started:
                block = end - 1
                while block > first:
                    for name, at in (("k", k), ("v", v)):
                        yield from full(name, at, (tile, block))
                        release(name, at)
                    block -= 1
                yield from full("k", k, (tile, block))
                yield from read("k", k, (tile, block))
                self.seen[rank, g].append((tile, block))
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
                self.seen[rank, g].append((tile, block))
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
                following = works[(index + 1) % KNOWN]
                started = following is not None and self.tiles[following][1][rank][g] == self.tiles[following][0]
                if started:
                    block = self.tiles[following][0] - 1
                    yield from full("k", k, (following, block))
                    yield from my_turn()
                    yield from full("v", v, (tile, 0))
                    next_turn()
                    yield from read("k", k, (following, block))
                    self.seen[rank, g].append((following, block))
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
        roles = [self.producer(r) for r in range(self.cluster)]
        roles += [self.consumer(r, g) for r in range(self.cluster) for g in range(self.groups)]
        waiting: dict[int, Callable[[], bool]] = {i: (lambda: True) for i in range(len(roles))}
        while waiting:
            ready = [i for i, passed in waiting.items() if passed()]
            choice = self.random.randrange(len(ready) + len(self.flying)) if ready or self.flying else -1
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
    draw: random.Random, cluster: int, groups: int, turns: bool, causal: bool
) -> list[tuple[int, list[list[int]]]]:
    """Each consumer's number of blocks: under a causal mask at most that of the one after, of a block's consumers alike
    where they take turns."""
    found = []
    for _ in range(draw.randrange(1, 9)):
        end = draw.randrange(1, 7)
        own, most = [], end
        for i in reversed(range(cluster * groups)):
            own.insert(0, most)
            if causal and not (turns and i % groups):
                most = max(most - draw.randrange(3), 1)
        found.append((end, [own[r * groups : (r + 1) * groups] for r in range(cluster)]))
    return found


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("early", "turns", "groups", "q_stages", "stages"),
    [
        (True, True, 2, 2, 2), (False, True, 2, 1, 2), (False, False, 2, 1, 2), (True, False, 4, 2, 4),
        (True, False, 2, 2, 2),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_no_role_waits_for_ever_and_none_reads_anothers_keys(
    cluster: int, early: bool, turns: bool, groups: int, q_stages: int, stages: int, causal: bool
) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        work = tiles(draw, cluster, groups, turns, causal)
        kernel = Kernel(work, cluster, early, turns, stages, groups, q_stages, draw)
        kernel.run()
        for (r, g), seen in kernel.seen.items():
            assert seen == [(t, b) for t, (_, own) in enumerate(work) for b in reversed(range(own[r][g]))]


def test_the_model_finds_a_stage_that_is_handed_back_to_one_block_alone() -> None:
    """Two blocks that wait for their own consumers only write over what the other one has to read."""
    with pytest.raises(AssertionError, match=r"is being read|in place of"):
        for seed in range(40):
            Kernel([(6, [[6, 6], [6, 6]])] * 4, 2, True, True, to_all=False, random=random.Random(seed)).run()
