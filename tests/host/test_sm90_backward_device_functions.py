"""The walk of the gradients' tiles (cuda_kernels/sm90/attention/backward/tiles.h) runs on the host:
every tile once, with the queries that see it, and an order of additions in which nobody waits for a
tile that comes later."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernelseam.contract import LaunchConfig, SourceBundle

pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
from mutant import Mutant  # noqa: E402
from sm90_probe import Change, Launch, run  # noqa: E402

KEYS, STEP, FIELDS = 64, 32, 11
TILES = f"""
#include "sm90/attention/backward/tiles.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* q_offsets, const int* k_offsets, i64* out, i64* blocks, i64* earlier) {{
  if (thread_index() != 0) return;
  const Band band{{(int)n[12], (int)n[13]}};
  const SumBlocks sums{{(int)n[8], (int)n[9], (int)n[6] * (int)n[7]}};
  int walk[2] = {{0, 0}};
  TileScheduler<{KEYS}> scheduler{{{{{{}}, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[7], (int)n[16], sums}},
                          {{nullptr, q_offsets, k_offsets, (int)n[10], (int)n[11]}}, band, walk}};
  for (int t = 0; t < (int)n[14]; t++) {{
    WorkTile w{{}};
    if (!scheduler.next(t, w)) return;
    const int found[] = {{w.batch, w.kv_head, w.tile, w.steps, w.first, w.stop, w.S_q, w.S_k, w.q_first, w.k_first, w.key_head}};
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


WALKS = {
    "plain": Walk(3, 4, 150, 100, head_group=2),
    "plain-sections": Walk(3, 4, 150, 300, section=5),
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
}


def backwards(walk: Walk, entry: int, head: int) -> bool:
    """Whether the tiles of a head walk from the last query to the first: in order, under a causal
    mask, in the last section of each cycle."""
    plain = walk.causal and walk.window is None and not walk.q
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
    constants = {
        "CAUSAL": int(walk.causal),
        "WINDOW": int(walk.window is not None),
        **dict.fromkeys(("PREFIX", "MASK", "ALIBI", "SOFTCAP", "SINKS", "LENGTHS", "GROUPED"), 0),
        "BIAS": "void",
        **dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), packed),
        "DQK": 64,
        "QK_COLUMNS": 64,
        "V_COLUMNS": 64,
        "DV": 64,
        "STEP": STEP,
        "IN_ORDER": int(walk.in_order),
    }
    run(TILES, constants, change, given, *offsets, out, blocks, earlier)
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
            assert (first, stop) == (down if backwards(walk, e, h) else up)
        for m in seeing:
            visits.setdefault((e, h, m), []).append((at, int(earlier[at, m])))
        # Blocks of sums of one head: nobody else's.
        for m in range(-(-S_q // STEP)):
            place = int(blocks[at]) + m
            assert places.setdefault(place, (e, m)) == (e, m)
            assert place < (head_blocks if packed else len(heads) * walk.head_group * head_blocks)
    for block, turns in visits.items() if walk.in_order else ():
        assert [waits for _, waits in sorted(turns)] == list(range(len(turns))), block


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


LISTS = """
KS_DEVICE int __popc(unsigned x) { return __builtin_popcount(x); }
#pragma push_macro("KS_KERNEL")
#undef KS_KERNEL
#define KS_KERNEL(threads, blocks) template<int> KS_DEVICE void
#include "sm90/attention/backward/query_lists.h"
#pragma pop_macro("KS_KERNEL")
KS_KERNEL(16, 1) probe(const BlockWord* blocks, const i64* n, unsigned* lists) {
  const Sequence s{(int)n[0], (int)n[1]};
  for (int tile = 0; tile < (int)n[2]; tile++)
    list_blocks(blocks, (int)n[3] + 1, (int)n[3], tile, s, lists + tile * n[4]);
}"""

LISTED: dict[str, int | str] = {
    **dict.fromkeys(("CAUSAL", "PREFIX", "IN_ORDER"), 1),
    **dict.fromkeys(("WINDOW", "MASK", "ALIBI", "SOFTCAP", "SINKS", "LENGTHS", "GROUPED"), 0),
    "BIAS": "void",
    **dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), 0),
    **dict.fromkeys(("DQK", "QK_COLUMNS", "V_COLUMNS", "DV"), 64),
    "STEP": STEP,
}


def check_lists(change: Change) -> None:
    """A tile of keys has the blocks of queries that some of its keys are seen by, each with the
    number of later tiles that have it, too. A block that sees nothing is the first tile's."""
    rng = np.random.default_rng(0)
    for S_q, S_k, share in ((STEP * 50 - 5, 9000, 0.3), (7, 100, 1.0), (STEP * 40, 4500, 0.01)):
        blocks, tiles = -(-S_q // STEP), -(-S_k // 128)
        some = rng.random((blocks, tiles)) < share
        every = some & (rng.random(some.shape) < 0.5)
        words, length = -(-tiles // 32), blocks + 1
        given = np.zeros((blocks, words + 1, 2), np.uint32)
        for which, bits in enumerate((some, every)):
            rows = np.pad(bits, ((0, 0), (0, 32 * words - tiles)))
            packed = np.packbits(rows, axis=1, bitorder="little")
            given[:, :words, which] = np.ascontiguousarray(packed).view(np.uint32)
        more = 3  # tiles that only longer sequences have
        lists = np.full((tiles + more, length), 0xFFFFFFFF, np.uint32)
        numbers = np.array([S_q, S_k, tiles + more, words, length], np.int64)
        run(LISTS, LISTED, change, given, numbers, lists)
        unseen = ~some.any(1)
        for tile in range(tiles):
            expected = [
                m
                | (not every[m, tile] or (m + 1) * STEP > S_q) << 15
                | some[m, tile + 1 :].sum() << 16
                for m in range(blocks)
                if some[m, tile] or (tile == 0 and unseen[m])
            ]
            assert list(lists[tile, : lists[tile, 0] + 1]) == [len(expected), *expected]
        assert not lists[tiles:, 0].any()


def test_lists_of_queries_have_every_block_and_its_place() -> None:
    check_lists(as_it_is)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("place-counts-the-tile-itself", "here.some >> tile % 32 >> 1", "here.some >> tile % 32"),
        ("places-of-the-first-word", "i < words; i++) rank", "i < 0; i++) rank"),
        ("last-rows-as-whole", "(m * STEP + STEP <= s.S_q)", "1"),
        ("unseen-blocks-left-out", "if (tile == 0 && rank == 0 && !some)", "if (false)"),
    ],
)
def test_a_planted_bug_of_lists_is_found(name: str, old: str, new: str) -> None:
    mutant = Mutant(name, "sm90/attention/backward/query_lists.h", old, new, "", "", "")
    with pytest.raises(AssertionError):
        check_lists(mutant)


HIDDEN = """
#include "sm90/attention/backward/elements.h"
KS_KERNEL(128, 1) probe(const int* prefixes, const i64* n, i64* seen) {
  const Band band{(int)n[0], (int)n[1]};
  ScoreArguments score{};
  score.prefixes = prefixes;
  for (int shape = 0; shape < (int)n[3]; shape++) {
    WorkTile w{};
    w.S_q = n[4 + 2 * shape], w.S_k = n[5 + 2 * shape];
    const int width = divide_up(w.S_k, 128) * 128;
    for (; w.tile * 128 < w.S_k; w.tile++)
      for (int x = 0; x < 32; x++)
        for (int m = 0; m * STEP < w.S_q; m++) {
          const int warp = warp_index(), key0 = w.tile * 128 + warp / 4 * 64, own = w.tile * 128 + warp * 16;
          float s[STEP / 2];
          for (int i = 0; i < STEP / 2; i++) s[i] = 0.f;
          const auto block = ListedBlock::of(m, n[2] || m * STEP + STEP > w.S_q, 0);
          Elements{score, 0, 0, w, 0, own, x}.hide_listed(s, block, band, key0, m * STEP - (key0 - (w.S_k - w.S_q)), key0 + 64 > w.S_k);
          for (int i = 0; i < STEP / 2; i++)
            seen[(m * STEP + i / 4 * 8 + x % 4 * 2 + i % 2) * width + own + x / 4 + 8 * (i / 2 % 2)] = s[i] == 0.f;
        }
    seen += divide_up(w.S_q, STEP) * STEP * width;
  }
}"""  # noqa: E501
SHAPES = (300, 350), (350, 300), (40, 500), (500, 40), (288, 256), (258, 288), (257, 129), (1, 1)
"""Queries and keys: fewer and more of either, whole blocks and tiles, and one in the last."""


def check_hidden(
    change: Change, band: str, packed: bool = False, masked: bool = False, softcap: bool = False
) -> None:
    """``masked``: what blocks' words say."""
    window, prefix = HIDING[band]
    constants = LISTED | {
        "CAUSAL": int(window is None),
        "WINDOW": int(window is not None),
        "SOFTCAP": int(softcap),
        **dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), int(packed)),
    }
    extents = [(-(-S_q // STEP) * STEP, -(-S_k // 128) * 128) for S_q, S_k in SHAPES]
    given = [*(window or (1000, 0)), int(masked), len(SHAPES), *(n for s in SHAPES for n in s)]
    seen = np.full(sum(q * k for q, k in extents), -1, np.int64)
    warps = LaunchConfig((1, 1, 1), (8 * 16, 1, 1), 0)
    arrays = np.array([prefix], np.int32), np.array(given, np.int64), seen
    run(HIDDEN, constants, change, *arrays, config=warps)
    first = 0
    for (S_q, S_k), (rows, columns) in zip(SHAPES, extents, strict=True):
        i, j = np.arange(rows)[:, None], np.arange(columns)[None]
        d = j - i - (S_k - S_q)
        visible = (d <= 0) if window is None else (-window[0] <= d) & (d <= window[1])
        expected = (visible | (j < prefix)) & (j < S_k) & (i < S_q)
        found = seen[first : first + rows * columns].reshape(rows, columns)
        np.testing.assert_array_equal(found, expected, f"{S_q} × {S_k}")
        first += rows * columns


HIDING: dict[str, tuple[tuple[int, int] | None, int]] = {
    "causal": (None, 0),
    "prefix": (None, 217),
    "window": ((103, 3), 0),
    "narrow-window": ((5, 0), 0),
    "window-ahead": ((0, 200), 0),
    "prefix-beside-a-window": ((103, 3), 70),
}
"""Bands, and prefixes."""


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("packed", [False, True], ids=["strided", "packed"])
@pytest.mark.parametrize("band", HIDING)
def test_of_a_listed_block_the_band_is_hidden_whatever_its_word_says(
    band: str, packed: bool, masked: bool
) -> None:
    check_hidden(as_it_is, band, packed, masked, softcap=packed)


ELEMENTS = "sm90/attention/backward/elements.h"


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "bands"),
    [
        (
            "band-left-to-the-word",
            ELEMENTS,
            "block.masked() || some_hidden(band, ahead, tail)",
            "block.masked()",
            ("causal", "prefix", "window"),
        ),
        (
            "keys-behind-the-last",
            ELEMENTS,
            "if (key() + lane / 4 + 8 * r >= w.S_k) low[r] = STEP;",
            "",
            ("window-ahead",),
        ),
        (
            "rows-behind-the-last",
            ELEMENTS,
            "low[r] = -STEP, high[r] = w.S_q - query - lane % 4 * 2;",
            "low[r] = -STEP, high[r] = STEP;",
            ("prefix",),
        ),
        ("first-hidden-by-the-band", TILES_FILE, "ahead < 63 -", "ahead < 62 -", ("causal",)),
        ("last-seen-of-a-window", TILES_FILE, "ahead + STEP - 1 >", "ahead >", ("window",)),
        (
            "end-of-the-keys",
            TILES_FILE,
            "bool masked = tail;",
            "bool masked = false;",
            ("window-ahead",),
        ),
    ],
)
def test_a_planted_bug_of_what_is_hidden_is_found(
    name: str, file: str, old: str, new: str, bands: tuple[str, ...]
) -> None:
    mutant = Mutant(name, file, old, new, "", "", "")
    for band in bands:
        with pytest.raises(AssertionError):
            check_hidden(mutant, band)
