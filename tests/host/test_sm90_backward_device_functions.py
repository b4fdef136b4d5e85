"""The walk of the gradients' tiles (cuda_kernels/sm90/attention/backward/tiles.h) runs on the host:
every tile once, with the queries that see it, and an order of additions in which nobody waits for a
tile that comes later."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernelseam.contract import SourceBundle

pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
from sm90_probe import Change, Launch, run  # noqa: E402

KEYS, STEP, FIELDS = 64, 32, 11
TILES = f"""
#include "sm90/attention/backward/tiles.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* prefixes, const int* q_offsets, const int* k_offsets, i64* out, i64* blocks, i64* earlier) {{
  if (thread_index() != 0) return;
  const Band band{{(int)n[12], (int)n[13], prefixes}};
  const SumBlocks sums{{(int)n[8], (int)n[9], (int)n[6] * (int)n[7]}};
  int walk[2] = {{0, 0}};
  TileScheduler<{KEYS}> scheduler{{{{{{}}, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[7], (int)n[16], sums}},
                          {{nullptr, q_offsets, k_offsets, (int)n[10], (int)n[11]}}, band, walk}};
  for (int t = 0; t < (int)n[14]; t++) {{
    WorkTile w{{}};
    if (!scheduler.next(t, w)) return;
    const int found[] = {{w.batch, w.kv_head, w.tile, w.steps, w.first, w.stop, w.S_q, w.S_k, w.q_first, w.k_first, w.banded.key_head}};
    for (int i = 0; i < {FIELDS}; i++) out[{FIELDS} * t + i] = found[i];
    blocks[t] = sums.first(w.batch, w.q_first);
    for (int m = 0; m < (int)n[15]; m++) earlier[(int)n[15] * t + m] = band.earlier(w, m, {KEYS});
  }}
}}"""  # noqa: E501


@dataclass(frozen=True)
class Walk(Launch):
    """Of gradients; heads are those of the keys."""

    cycle: int = 1000
    """Of so many sections one walks backwards, counted from the last; none where it is 0."""
    in_order: bool = False
    head_parts: int = 1
    """Heads that share the keys of one."""
    staggered: bool = False
    """In order, where all tiles of a section run at once."""
    prefixes: tuple[int, ...] = ()
    """Of entries: keys that every query sees."""

    def sees(self, entry: int, i: int, j: int) -> bool:
        return super().sees(entry, i, j) or (bool(self.prefixes) and j < self.prefixes[entry])


WALKS = {
    "plain": Walk(3, 4, 150, 100, head_group=2),
    "plain-sections": Walk(3, 4, 150, 300, section=5),
    "staggered": Walk(2, 3, 650, 500, head_group=2, section=6, staggered=True),
    "staggered-many-tiles": Walk(1, 2, 90, 470, section=2, staggered=True),
    "staggered-sections": Walk(3, 3, 650, 500, section=4, staggered=True),
    "causal": Walk(2, 5, 150, 170, causal=True, section=4),
    "causal-every-other-section": Walk(
        2, 4, 150, 170, head_group=2, causal=True, section=2, cycle=2
    ),
    "causal-never-backwards": Walk(2, 5, 150, 170, causal=True, section=4, cycle=0),
    "causal-parts": Walk(2, 6, 150, 170, head_group=2, causal=True, section=4, head_parts=3),
    "causal-few-keys": Walk(1, 3, 200, 70, causal=True, section=2),
    "causal-few-queries": Walk(1, 3, 40, 270, causal=True, section=2),
    "window": Walk(2, 2, 330, 400, window=(103, 3), section=3),
    "window-unseen-keys": Walk(1, 2, 40, 500, window=(30, 0), section=2),
    "sequences": Walk(5, 2, 130, 130, q=(70, 0, 64, 130, 1), k=(70, 40, 0, 100, 33)),
    "causal-sequences": Walk(
        5, 3, 130, 130, causal=True, q=(70, 0, 64, 130, 1), k=(90, 40, 7, 100, 33), head_group=2
    ),
    "prefix": Walk(4, 3, 350, 370, causal=True, section=4, prefixes=(0, 100, 64, 1000)),
    "prefix-of-few-keys": Walk(2, 2, 350, 70, causal=True, section=2, prefixes=(20, 70)),
    "prefix-before-a-window": Walk(
        4, 2, 330, 500, window=(63, 3), section=3, prefixes=(0, 70, 128, 499)
    ),
    "prefix-before-a-window-behind-the-keys": Walk(
        2, 1, 200, 200, window=(-40, 100), prefixes=(10, 190)
    ),
    "prefix-of-sequences": Walk(
        4,
        2,
        230,
        330,
        causal=True,
        q=(170, 0, 64, 230),
        k=(190, 40, 7, 330),
        prefixes=(9, 3, 50, 200),
    ),
}


def backwards(walk: Walk, entry: int, head: int) -> bool:
    """Whether the tiles of a head walk from the last query to the first: in order, under a causal
    mask, in the last section of each cycle."""
    plain = walk.causal and walk.window is None and not walk.q and not walk.prefixes
    last, own = (
        n // walk.section for n in (walk.batch * walk.heads - 1, entry * walk.heads + head)
    )
    return walk.in_order and plain and walk.cycle > 0 and (last - own) % walk.cycle == 0


def as_it_is(made: SourceBundle) -> SourceBundle:
    return made


def check_walk(walk: Walk, change: Change) -> None:
    heads = [(e, h) for e in range(walk.batch) for h in range(walk.heads)]
    tiles = [(e, h, n) for e, h in heads for n in range(-(-walk.lengths(e)[1] // KEYS))]
    key_tiles, query_blocks = -(-walk.S_k // KEYS), -(-walk.S_q // STEP)
    packed, total_q = int(bool(walk.q)), sum(walk.q)
    offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (walk.q, walk.k)]
    left, right = walk.window or (0, 0)
    head_blocks = total_q // STEP + walk.batch if packed else query_blocks
    given = np.array(
        [
            key_tiles,
            key_tiles * len(heads),
            walk.section,
            walk.section * key_tiles,
            walk.cycle,
            walk.batch,
            walk.heads,
            walk.head_group,
            query_blocks,
            head_blocks,
            walk.S_q,
            walk.S_k,
            left,
            right,
            len(tiles) + 3,
            query_blocks,
            walk.head_parts,
        ],
        np.int64,
    )
    out = np.full((len(tiles) + 3, FIELDS), -1, np.int64)
    blocks, earlier = np.zeros(len(out), np.int64), np.zeros((len(out), query_blocks), np.int64)
    constants: dict[str, int | str] = {
        "CAUSAL": int(walk.causal),
        "WINDOW": int(walk.window is not None),
        "PREFIX": int(bool(walk.prefixes)),
        **dict.fromkeys(("MASK", "ALIBI", "SOFTCAP", "SINKS", "LENGTHS", "GROUPED"), 0),
        "BIAS": "void",
        **dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), packed),
        "DQK": 64,
        "QK_COLUMNS": 64,
        "V_COLUMNS": 64,
        "DV": 64,
        "STEP": STEP,
        "IN_ORDER": int(walk.in_order),
        "STAGGERED": int(walk.staggered and walk.in_order),
    }
    prefixes = np.array(walk.prefixes or (0,), np.int32)
    run(TILES, constants, change, given, prefixes, *offsets, out, blocks, earlier)
    found = [tuple(int(x) for x in row) for row in out if row[0] >= 0]
    assert sorted((e, h, n) for e, h, n, *_ in found) == tiles, "every tile once"

    visits: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    places: dict[int, tuple[int, int]] = {}
    for at, (e, h, n, steps, first, stop, S_q, S_k, q_first, k_first, key) in enumerate(found):
        assert key == h // walk.head_parts
        assert (S_q, S_k) == walk.lengths(e)
        assert not packed or (q_first, k_first) == (sum(walk.q[:e]), sum(walk.k[:e]))
        keys = range(n * KEYS, min((n + 1) * KEYS, S_k))
        seeing = [
            m
            for m in range(-(-S_q // STEP))
            if any(
                walk.sees(e, i, j) for i in range(m * STEP, min((m + 1) * STEP, S_q)) for j in keys
            )
        ]
        assert steps == walk.head_group * len(seeing)
        if seeing:
            up, down = (seeing[0], seeing[-1] + 1), (seeing[-1], seeing[0] - 1)
            if walk.in_order and walk.staggered:
                up = n * query_blocks // key_tiles, query_blocks
            assert (first, stop) == (down if backwards(walk, e, h) else up)
        for m in seeing:
            visits.setdefault((e, h, m), []).append((at, int(earlier[at, m])))
        # Blocks of sums of one head: nobody else's.
        for m in range(-(-S_q // STEP)):
            place = int(blocks[at]) + m
            assert places.setdefault(place, (e, m)) == (e, m)
            assert place < (head_blocks if packed else len(heads) * walk.head_group * head_blocks)
    for block, turns in visits.items() if walk.in_order else ():
        waited_for = [waits for _, waits in sorted(turns)]
        if walk.staggered:
            assert sorted(waited_for) == list(range(len(turns))), block
        else:
            assert waited_for == list(range(len(turns))), block
    if walk.in_order and walk.staggered:
        together, alone = walk.section * key_tiles, query_blocks * walk.head_group
        of_a_section = alone + max(key_tiles - query_blocks, 0)
        ordered = [(f[0], f[1], f[4]) for f in found]
        for grid in (together, together + 3):
            steps = steps_of_a_launch(ordered, earlier, walk, grid)
            assert steps <= -(-len(heads) // walk.section) * of_a_section


def steps_of_a_launch(
    tiles: list[tuple[int, int, int]], ranks: np.ndarray, walk: Walk, grid: int
) -> int:
    """Of tiles (entry, KV head, first block) that the grid's blocks have in turn, where a tile
    takes a step once those before it have added. Raises AssertionError where all wait."""
    blocks, steps = ranks.shape[1], 0
    done: dict[tuple[int, int, int, int], int] = {}
    running = dict.fromkeys(range(min(grid, len(tiles))), 0)
    while running:
        goes = list[tuple[int, tuple[int, int, int, int]]]()
        for t, walked in running.items():
            entry, head, first = tiles[t]
            m = (first + walked) % blocks
            sums = entry, head, walked // blocks, m
            if done.get(sums, 0) == ranks[t, m]:
                goes.append((t, sums))
        assert goes, "tiles wait for each other"
        for t, sums in goes:
            done[sums] = done.get(sums, 0) + 1
            running[t] += 1
            if running[t] == blocks * walk.head_group:
                del running[t]
                if t + grid < len(tiles):
                    running[t + grid] = 0
        steps += 1
    return steps


@pytest.mark.parametrize("in_order", [False, True], ids=["any-order", "in-order"])
@pytest.mark.parametrize("name", WALKS)
def test_every_tile_meets_the_queries_that_see_it_and_waits_for_those_before(
    name: str, in_order: bool
) -> None:
    check_walk(replace(WALKS[name], in_order=in_order), as_it_is)


TILES_FILE = "sm90/attention/backward/tiles.h"
BUGS = {
    "begin-of-the-band": ("max_of(j - shift - reach(), 0)", "max_of(j - reach(), 0)", "causal"),
    "end-of-the-band": ("j - shift + left + 1", "j - shift + left", "window"),
    "tiles-that-a-block-meets": ("i + STEP + shift + reach()", "i + shift + reach()", "causal"),
    "order-of-tiles": ("w.tile = count.key_tiles - 1 - w.tile", "w.tile = w.tile", "causal"),
    "order-backwards": ("w.way() < 0 ? w.tile :", "w.way() < 0 ? 0 :", "causal"),
    "way-of-the-last-section": (
        "(u32)((count.total - 1) / count.section_tiles - section) % (u32)count.cycle == 0",
        "true",
        "causal",
    ),
    "which-section-of-a-cycle": (
        "(count.total - 1) / count.section_tiles - section",
        "section",
        "causal-every-other-section",
    ),
    "heads-of-a-section": (
        "count.batch * count.kv_heads - section * count.section",
        "count.section",
        "causal",
    ),
    "keys-of-another-head": ("(u32)w.kv_head / (u32)count.head_parts", "w.kv_head", "causal-parts"),
    "steps-of-one-head": (" * count.head_group : 0", " : 0", "plain"),
    "tiles-of-a-prefix": ("max_of(everyone - 1 - w.tile, 0) +", "", "prefix"),
    "tiles-of-a-prefix-and-of-the-band": (
        "max_of(max_of(key / keys, everyone), w.tile + 1)",
        "max_of(key / keys, w.tile + 1)",
        "prefix-before-a-window",
    ),
    "band-behind-the-keys": (
        "(key < w.S_k ? max_of(end - begin, 0) : 0)",
        "max_of(end - begin, 0)",
        "prefix-before-a-window-behind-the-keys",
    ),
    "band-before-the-keys": (
        "if (Config::PREFIX) end = max_of(end, 0);",
        "",
        "prefix-of-few-keys",
    ),
    "queries-of-a-prefix": (
        "if (key < w.banded.prefix) begin = 0,",
        "if (key < w.banded.prefix)",
        "prefix",
    ),
    "where-tiles-begin": ("(u32)(w.tile * end)", "(u32)w.tile", "staggered"),
    "who-adds-before": ("divide_up((m + 1) * tiles", "divide_up(m * tiles", "staggered"),
    "order-around-the-end": ("before < 0 ? before + tiles", "before < 0 ? before", "staggered"),
    "tiles-of-a-sequence": ("before += tiles * count.kv_heads", "before += tiles", "sequences"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    find, plant, walk = BUGS[name]

    def planted(made: SourceBundle) -> SourceBundle:
        files = dict(made.files)
        assert files[TILES_FILE].count(find) == 1
        files[TILES_FILE] = files[TILES_FILE].replace(find, plant)
        return replace(made, files=tuple(sorted(files.items())))

    with pytest.raises(AssertionError):
        check_walk(replace(WALKS[walk], in_order=walk != "plain"), planted)
