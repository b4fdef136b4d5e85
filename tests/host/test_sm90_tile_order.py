"""Hopper's attention under masks that are no bands, on the host: tiles in the order of their work,
ranges of captured arrays that lanes read together, blocks of keys from the diagonal outwards, and
weights of keys that a mask hides beside a softcap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
from kernelseam_cuda.sm90.attention_softcap import small_cap  # noqa: E402
from mutant import Mutant  # noqa: E402
from sm90_probe import TILES_CONSTANTS, Change, as_it_is, run  # noqa: E402

TILE_ORDER = """
KS_DEVICE int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_RELAXED); }
#include "sm90/attention/tile_order.h"
KS_KERNEL(16, 1) probe(BlockWord* base, int* buckets, const i64* n) {
  order_tiles(VisitedBlocks{base, 0, 0, (int)n[1] + 1, (int)n[1]}, 0, 0, (int)n[0], buckets);
}"""
EXTREMA = """
#include "tile/element.h"
KS_KERNEL(16, 1) probe(const float* x, const i64* ranges, float* out) {
  for (int i = 0; i < 40; i++) {
    const int own = (i + thread_index() / 4) % 40;
    const i64 first = ranges[2 * own], last = ranges[2 * own + 1];
    const auto found = extrema<float, 4>(x, 2, 300, first, last);
    out[32 * i + 2 * thread_index()] = found.least, out[32 * i + 2 * thread_index() + 1] = found.most;
  }
}"""  # noqa: E501
OUTWARDS = """
#include "sm90/attention/tiles.h"
KS_KERNEL(16, 1) probe(const i64* n, i64* out) {
  if (thread_index() != 0) return;
  WorkTile w{};
  w.begin = (int)n[0], w.end = (int)n[1], w.diagonal = (int)n[2];
  for (int left = w.end - 1; left >= w.begin; left--) *out++ = w.visited(left);
}"""

HIDDEN_BESIDE_CAP = """
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
template<class T> struct Mma;
KS_DEVICE int __all_sync(unsigned m, int x) { return __ballot_sync(m, x) == (1u << WARP) - 1; }
KS_DEVICE int __any_sync(unsigned m, int x) { return __ballot_sync(m, x) != 0; }
KS_DEVICE float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
KS_DEVICE float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
#include "sm90/attention/score.h"
KS_KERNEL(16, 1) probe(float* s, const i64* seen, const float* n) {
  const SmallCap small_cap{n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9]};
  const ScoreArguments arguments{};
  Scores scores{};
  scores.cap = n[10], scores.cap_inverse = n[11];
  const TileScore<32> score{scores, small_cap, arguments};
  TileScore<32>::Rows rows{};
  rows.mask[0] = (u32)seen[2 * thread_index()], rows.mask[1] = (u32)seen[2 * thread_index() + 1];
  float x[16], m[2] = {n[12], n[12]}, sum[2];
  for (int i = 0; i < 16; i++) x[i] = s[16 * thread_index() + i];
  const auto form = score.begin<true>(x, {1.f, 1.f}, rows, score.ahead<true>(rows, 0), 0);
  if (n[13] != 0.f) score.exponentials<0, 16, true>(x, m, sum, form);
  else score.exponentials<0, 16, false>(x, m, sum, form);
  for (int i = 0; i < 16; i++) s[16 * thread_index() + i] = x[i];
}"""


def check_order(change: Change) -> None:
    """Each tile once; a longer one does not come behind one that is shorter by more than a bucket,
    and those that are not there come last."""
    rng = np.random.default_rng(0)
    for tiles, words in ((1, 1), (40, 1), (300, 4), (70, 30)):
        most = 3 * 32 * words + 1
        work = rng.integers(1, most + 1, tiles).astype(np.int32)
        work[rng.random(tiles) < 0.2] = 0
        slots = np.full((tiles, words + 1, 2), -1, np.int32)
        slots[:, words, 1] = work
        given = np.array([tiles, words], np.int64)
        run(TILE_ORDER, TILES_CONSTANTS | {"MASK": 1}, change, slots, np.zeros(128, "i4"), given)
        order = slots[:, words, 0]
        assert sorted(order) == list(range(tiles))
        found = work[order].astype(np.int64)
        assert (np.diff(found) <= most // 126 + 1).all(), "the longest come first"
        assert not found[np.count_nonzero(work) :].any(), "tiles that are not there come last"


def check_extrema(change: Change) -> None:
    """Those of every range, in every lane; beyond the array counts as its last element. Of long
    ranges nothing is said, and other lanes' are found beside them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 2)).astype(np.float32)
    x[250] = np.nan
    first = rng.integers(0, 290, 40)
    last = first + rng.integers(0, 200, 40)
    last[::7] = first[::7] + 1025
    found = np.zeros((40, 16, 2), np.float32)
    run(EXTREMA, {}, change, x, np.stack([first, last], -1).astype(np.int64), found)
    for i, lanes in enumerate(found):
        for lane, ends in enumerate(lanes):
            a, b = first[own := (i + lane // 4) % 40], last[own]
            seen = x[a : b + 1, 0]
            expected = [-np.inf, np.inf] if b - a > 1024 else [seen.min(), seen.max()]
            np.testing.assert_array_equal(ends, expected)


def check_outwards(change: Change) -> None:
    """Every block once: from the diagonal to the first, then to the last."""
    for begin, end, diagonal in ((0, 9, 4), (2, 9, 8), (3, 9, 3), (0, 1, 0)):
        found = np.zeros(end - begin, np.int64)
        given = np.array([begin, end, diagonal], np.int64)
        run(OUTWARDS, TILES_CONSTANTS | {"ALIBI": 1}, change, given, found)
        assert found.tolist() == [*range(diagonal, begin - 1, -1), *range(diagonal + 1, end)]


def check_hidden_beside_cap(change: Change) -> None:
    """Of products for which either polynomial or tanh itself serves, in steps with maxima and in
    those without: a key that is hidden has no weight."""
    rng = np.random.default_rng(2)
    cap, inverse, reference = 2 / np.log(2), 0.0625, 0.5
    numbers = [*small_cap(cap, inverse).values(), cap, inverse, reference]
    element = np.arange(16)
    bits, row = element // 4 * 2 + element % 2, element // 2 % 2
    for size, maxima in ((1, 1), (1, 0), (5, 1), (5, 0), (60, 1), (60, 0)):
        x = rng.uniform(-size, size, (16, 16)).astype(np.float32)
        seen = rng.integers(0, 256, (16, 2))
        weights = np.exp2(cap * np.tanh(x.astype(np.float64) * inverse) - reference)
        expected = np.where(seen[:, row] >> bits & 1, weights, 0)
        given = np.array([*numbers, maxima], np.float32)
        options = TILES_CONSTANTS | {"MASK": 1, "SOFTCAP": 1, "Q_SCALES": 0}
        run(HIDDEN_BESIDE_CAP, options, change, x, seen, given)
        np.testing.assert_allclose(x, expected, rtol=2e-6, atol=0)


CHECKS: dict[str, Callable[[Change], None]] = {
    "order": check_order,
    "extrema": check_extrema,
    "outwards": check_outwards,
    "hidden-beside-cap": check_hidden_beside_cap,
}


BUGS = {
    "order": Mutant(
        "shortest-first",
        "sm90/attention/tile_order.h",
        "BUCKETS - 2 - (int)(",
        "(int)(",
        *("", "", "the longest tiles come last"),
    ),
    "extrema": Mutant(
        "lanes-not-together",
        "tile/element.h",
        "for (int m = 1; m < LANES; m *= 2) least",
        "for (int m = 1; m < LANES / 2; m *= 2) least",
        *("", "", "two lanes' parts of a range are lost"),
    ),
    "outwards": Mutant(
        "diagonal-twice",
        "sm90/attention/tiles.h",
        "before <= diagonal - begin",
        "before < diagonal - begin",
        *("", "", "the first block comes as the one behind the diagonal"),
    ),
    "hidden-beside-cap": Mutant(
        "hidden-keys-capped",
        "sm90/attention/score.h",
        "return {mode, f.c};",
        "return {CAPPED ? cap_large(s, scores.cap, scores.cap_inverse, small_cap) : mode, f.c};",
        *("", "", "a hidden key's score is the least that the cap leaves"),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_walks(name: str) -> None:
    CHECKS[name](as_it_is)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](BUGS[name])
