"""Hopper's gradients by lists of blocks of queries (tiles.h, query_lists.h and elements.h of
cuda_kernels/sm90/attention/backward), on the host: what is in a tile's list, when it adds to the
sums, and which pairs of a step are hidden."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam.contract import LaunchConfig  # noqa: E402
from kernelseam.kernels.expression import EXPRESSION  # noqa: E402
from mutant import Mutant  # noqa: E402
from sm90_probe import Change, as_it_is, run  # noqa: E402

STEP = 32
TILES_FILE = "sm90/attention/backward/tiles.h"

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
    **dict.fromkeys(
        ("WINDOW", "MASK", "ALIBI", "SOFTCAP", "SINKS", "LENGTHS", "GROUPED", "STAGGERED"), 0
    ),
    "BIAS": "void",
    **dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), 0),
    **dict.fromkeys(("DQK", "QK_COLUMNS", "V_COLUMNS", "DV"), 64),
    "STEP": STEP,
}


def with_mask(change: Change) -> Change:
    """With a mask_mod, by which tiles have lists; it hides nothing."""
    mask = Mutant("mask", EXPRESSION, "HAS_MASK = false", "HAS_MASK = true", "", "", "")
    return lambda made: change(mask(made))


def check_lists(change: Change) -> None:
    """A tile of keys has the blocks of queries that some of its keys are seen by, each with the
    number of later tiles that have it, too. A block that sees nothing is the first tile's."""
    rng = np.random.default_rng(0)
    for S_q, S_k, share in ((STEP * 50 - 5, 9000, 0.3), (7, 100, 1.0), (STEP * 40, 4500, 0.01)):
        blocks, tiles = -(-S_q // STEP), -(-S_k // 128)
        some = np.asarray(rng.random((blocks, tiles)) < share)
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
        run(LISTS, LISTED, with_mask(change), given, numbers, lists)
        seen = set(np.nonzero(some)[0].tolist())
        for tile in range(tiles):
            expected = [
                m
                | (not every[m, tile] or (m + 1) * STEP > S_q) << 15
                | some[m, tile + 1 :].sum() << 16
                for m in range(blocks)
                if some[m, tile] or (tile == 0 and m not in seen)
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


LISTED_TILES = (
    LISTS[: LISTS.index("KS_KERNEL(16, 1)")]
    + """
KS_KERNEL(16, 1) probe(const BlockWord* blocks, const i64* n, const int* q_offsets, const int* k_offsets, unsigned* lists, i64* out) {
  const Sequences sequences{nullptr, q_offsets, k_offsets, (int)n[0], (int)n[1]};
  const int key_tiles = (int)n[2], batch = (int)n[3], kv_heads = (int)n[4], words = (int)n[5], length = (int)n[6], query_blocks = length - 1;
  const int section = (int)n[7];
  for (int entry = 0; entry < batch; entry++)
    for (int tile = 0; tile < key_tiles; tile++)
      list_blocks(blocks + entry * query_blocks * (words + 1), words + 1, words, tile, sequences.at(entry), lists + (entry * key_tiles + tile) * length);
  if (thread_index() != 0) return;
  int walk[2] = {0, 0};
  TileScheduler<KEYS> scheduler{{{lists, key_tiles * length, length}, key_tiles, key_tiles * batch * kv_heads, section, section * key_tiles, 0, batch, kv_heads,
                                 1, 1, SumBlocks{query_blocks, query_blocks, kv_heads}}, sequences, Band{0, 0}, walk};
  WorkTile w{};
  for (int t = 0; scheduler.next(t, w); t++) {
    const i64 found[] = {w.batch, w.kv_head, w.tile, w.steps, w.first, w.stop, w.list - lists};
    for (const i64 x : found) *out++ = x;
  }
}"""  # noqa: E501
)


@pytest.mark.parametrize("packed", [False, True], ids=["strided", "packed"])
def test_a_listed_tile_waits_for_those_alone_that_come_before(packed: bool) -> None:
    check_places(as_it_is, packed)


@pytest.mark.parametrize(
    ("packed", "old", "new"),
    [
        (False, "w.tile = count.key_tiles - 1 - w.tile", "w.tile = w.tile"),
        (True, "w.tile = tiles - 1 - tile", "w.tile = tile"),
    ],
)
def test_another_order_of_tiles_is_found(packed: bool, old: str, new: str) -> None:
    mutant = Mutant("order", TILES_FILE, old, new, "", "", "")
    with pytest.raises(AssertionError):
        check_places(mutant, packed)


def check_places(change: Change, packed: bool) -> None:
    """Whatever the words say: of a head's block of queries the first tile that is handed out has
    place 0, and so on; every block has one."""
    rng = np.random.default_rng(7)
    q, k = ((700, 0, 90, 1300), (4200, 300, 0, 129)) if packed else ((1300,) * 3, (4200,) * 3)
    batch, kv_heads, blocks, key_tiles = len(q), 3, -(-max(q) // STEP), -(-max(k) // 128)
    words = -(-key_tiles // 32)
    given = np.zeros((batch, blocks, words + 1, 2), np.uint32)
    for entry in range(batch):
        some = rng.random((blocks, 32 * words)) < 0.3
        some[:, -(-k[entry] // 128) :] = False
        some[3] = False
        bits = np.packbits(some, axis=1, bitorder="little")
        given[entry, :, :words, 0] = np.ascontiguousarray(bits).view(np.uint32)
    offsets = [np.array([0, *accumulate(x)], np.int32) for x in (q, k)]
    numbers = [max(q), max(k), key_tiles, batch, kv_heads, words, blocks + 1, 2]
    lists = np.zeros((batch, key_tiles, blocks + 1), np.uint32)
    out = np.full((batch * kv_heads * key_tiles + 1, 7), -1, np.int64)
    views = dict.fromkeys(("Q_VIEW", "KV_VIEW", "OUT_VIEW"), int(packed))
    given_numbers = np.array(numbers, np.int64)
    run(LISTED_TILES, LISTED | views, with_mask(change), given, given_numbers, *offsets, lists, out)
    done = dict[tuple[int, int, int], int]()
    for entry, head, _, steps, first, stop, at in out[out[:, 0] >= 0].tolist():
        assert (first, steps) == (0, stop)
        for word in lists.ravel()[at : at + stop].tolist():
            block = entry, head, word & 0x7FFF
            assert word >> 16 == done.get(block, 0)
            done[block] = (word >> 16) + 1
    wanted = {
        (entry, head, m)
        for entry in range(batch)
        for head in range(kv_heads)
        for m in range(-(-q[entry] // STEP) if k[entry] else 0)
    }
    assert done.keys() == wanted


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
          Elements{score, 0, 0, w, 0, own, x}.hide_listed(s, block, band, key0, m * STEP - (key0 - (w.S_k - w.S_q)), key0 + 64 > w.S_k, {});
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
    run(HIDDEN, constants, with_mask(change), *arrays, config=warps)
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
            "if (some_hidden(band, ahead, tail) || query",
            "if (block.masked() || query",
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
            "high[r] = min_of(w.S_q - query - lane % 4 * 2,",
            "high[r] = min_of(STEP,",
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
