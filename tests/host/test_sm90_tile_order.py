"""Hopper's attention under masks that are no bands, on the host: tiles in the order of their work,
ranges of captured arrays that lanes read together, and blocks of keys from the diagonal outwards.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
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
    const i64 first = ranges[2 * i], last = ranges[2 * i + 1];
    const float least = extremum<true, float, 4>(x, 2, 300, first, last), most = extremum<false, float, 4>(x, 2, 300, first, last);
    out[32 * i + 2 * thread_index()] = least, out[32 * i + 2 * thread_index() + 1] = most;
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
        run(TILE_ORDER, TILES_CONSTANTS | {"MASK": 1}, change, slots, np.zeros(256, "i4"), given)
        order = slots[:, words, 0]
        assert sorted(order) == list(range(tiles))
        found = work[order].astype(np.int64)
        assert (np.diff(found) <= most // 254 + 1).all(), "the longest come first"
        assert not found[np.count_nonzero(work) :].any(), "tiles that are not there come last"


def check_extrema(change: Change) -> None:
    """Those of every range, in every lane; beyond the array counts as its last element."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 2)).astype(np.float32)
    x[250] = np.nan
    first = rng.integers(0, 290, 40)
    last = first + rng.integers(0, 200, 40)
    found = np.zeros((40, 16, 2), np.float32)
    run(EXTREMA, {}, change, x, np.stack([first, last], -1).astype(np.int64), found)
    for a, b, lanes in zip(first, last, found, strict=True):
        seen = x[a : b + 1, 0]
        np.testing.assert_array_equal(lanes, np.tile([seen.min(), seen.max()], (16, 1)))


def check_outwards(change: Change) -> None:
    """Every block once: from the diagonal to the first, then to the last."""
    for begin, end, diagonal in ((0, 9, 4), (2, 9, 8), (3, 9, 3), (0, 1, 0)):
        found = np.zeros(end - begin, np.int64)
        given = np.array([begin, end, diagonal], np.int64)
        run(OUTWARDS, TILES_CONSTANTS | {"ALIBI": 1}, change, given, found)
        assert found.tolist() == [*range(diagonal, begin - 1, -1), *range(diagonal + 1, end)]


CHECKS: dict[str, Callable[[Change], None]] = {
    "order": check_order,
    "extrema": check_extrema,
    "outwards": check_outwards,
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
        "for (int m = 1; m < LANES; m *= 2) best",
        "for (int m = 1; m < LANES / 2; m *= 2) best",
        *("", "", "two lanes' parts of a range are lost"),
    ),
    "outwards": Mutant(
        "diagonal-twice",
        "sm90/attention/tiles.h",
        "before <= diagonal - begin",
        "before < diagonal - begin",
        *("", "", "the first block comes as the one behind the diagonal"),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_walks(name: str) -> None:
    CHECKS[name](as_it_is)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](BUGS[name])
