"""The list of work of Hopper's latent attention on the host: who takes which tiles of keys, and
where the parts of an item are found again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam.contract import LaunchConfig, SourceBundle  # noqa: E402
from sm90_probe import run  # noqa: E402

SOURCE = """
#include "sm90/attention/latent_list.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* lengths, i64* pieces, i64* parts) {
  const List list{lengths, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6]};
  for (int block = 0; block < list.blocks; block++) {
    Walk walk{list};
    bool more = walk.start(block);
    while (more) {
      const Piece x = walk.piece;
      const int found[] = {block, x.entry, x.item, x.begin, x.end, x.tiles};
      for (int i = 0; i < 6; i++) pieces[i] = found[i];
      pieces += 6;
      more = walk.next();
    }
  }
  const Cut cut(list.total(), list.blocks);
  for (int b = 0; b < list.batch; b++)
    for (int i = 0; i < list.items_of_entry(); i++, parts += 2) {
      const int first = list.places_before(b) + i * (list.tiles(b) + ITEM_COST) + ITEM_COST;
      parts[0] = cut.taker(first), parts[1] = cut.taker(first + list.tiles(b) - 1);
    }
}"""  # noqa: E501
CONSTANTS = {
    **dict.fromkeys(("KS_WINDOW", "KS_PREFIX", "KS_MASK", "KS_ALIBI", "KS_SOFTCAP", "KS_SINKS"), 0),
    "KS_Q_VIEW": 0,
    "KS_OUT_VIEW": 0,
    "KS_KV_VIEW": 2,
    "KS_LENGTHS": 1,
    "KS_CAUSAL": 1,
    "KS_BIAS": "void",
}
MANY = [int(x) for x in np.exp(np.random.default_rng(3).uniform(0, 9, 40))]


@pytest.mark.parametrize(
    ("lengths", "S_q", "heads", "blocks", "item_cost"),
    [
        ([1], 1, 16, 132, 2),
        ([0, 64, 65, 0], 2, 128, 132, 2),
        ([32768], 1, 128, 132, 2),
        ([4096] * 33, 1, 16, 132, 2),
        (MANY, 1, 64, 132, 2),
        (MANY, 2, 130, 7, 5),
    ],
)
def test_every_tile_is_taken_once_and_its_parts_are_found(
    lengths: list[int], S_q: int, heads: int, blocks: int, item_cost: int
) -> None:
    head_tiles, batch = -(-heads // 64), len(lengths)
    items = S_q * head_tiles
    numbers = np.array([S_q, max(lengths), batch, 1, heads, head_tiles, blocks], np.int64)
    pieces = np.full((blocks * (2 + batch * items), 6), -1, np.int64)
    parts = np.full((batch, items, 2), -1, np.int64)
    run(
        SOURCE,
        {**CONSTANTS, "KS_ITEM_COST": item_cost},
        lambda bundle: bundle,
        numbers,
        np.array(lengths, np.int32),
        pieces,
        parts,
    )
    found = [tuple(map(int, x)) for x in pieces if x[0] >= 0]
    taken = defaultdict(list)
    for block, entry, item, begin, end, tiles in found:
        assert tiles == max(-(-lengths[entry] // 64), 1) and begin < end <= tiles
        taken[entry, item].append((begin, end, block))
    assert len(taken) == batch * items, "every item, also of no keys"
    states = set()
    for (entry, item), ranges in taken.items():
        tiles = max(-(-lengths[entry] // 64), 1)
        assert [begin for begin, _, _ in ranges] == [0, *(end for _, end, _ in ranges[:-1])]
        assert ranges[-1][1] == tiles
        of_blocks = [block for _, _, block in ranges]
        first, last = (int(x) for x in parts[entry, item])
        assert of_blocks == list(range(first, last + 1))
        for begin, end, block in ranges:
            if (begin, end) != (0, tiles):
                # latent.h's state of the piece, and state_of's for the merge
                state = 2 * block + (begin == 0)
                assert state == 2 * block + (block == first) and state not in states
                states.add(state)
    places = sum((max(-(-n // 64), 1) + item_cost) * items for n in lengths)
    used = min(blocks, max(places // (item_cost + 2), 1))
    share = defaultdict(int)
    for block, _, _, begin, end, _ in found:
        share[block] += end - begin
    assert max(share.values()) <= -(-places // used), "no block has more than its part"


MERGE = """
struct float4 { float x, y, z, w; };
#include "sm90/attention/latent_merge.h"
KS_KERNEL(128, 1) probe(const i64* n, const int* lengths, const float* sums, const float* sums_lse, float* out, float* lse) {
  const List list{lengths, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6]};
  const int heads = (int)n[4], S_q = (int)n[0];
  attention_latent_merge_sm90({sums, sums_lse, {out, S_q * heads * KS_DV, KS_DV, heads * KS_DV}, {lse, heads * S_q, S_q}, (int)n[7]}, list);
}"""  # noqa: E501


def callable_on_the_host(bundle: SourceBundle) -> SourceBundle:
    """The merge as a function, without the instruction that waits for earlier kernels."""
    changed = [
        (
            name,
            text.replace("KS_KERNEL(THREADS, 1)", "KS_DEVICE void").replace(
                "earlier_kernels_wait();", ""
            )
            if name.endswith("latent_merge.h")
            else text,
        )
        for name, text in bundle.files
    ]
    assert changed != list(bundle.files)
    return replace(bundle, files=tuple(changed))


@pytest.mark.parametrize("sharing", [1, 2, 8])
@pytest.mark.parametrize(("lengths", "S_q", "heads"), [([700, 0, 3000], 1, 20), ([2000], 2, 70)])
def test_parts_are_joined(lengths: list[int], S_q: int, heads: int, sharing: int) -> None:
    """Against float64; what one block has whole is left alone, and of parts without a key nothing
    is read."""
    rng, blocks, item_cost, dim = np.random.default_rng(1), 9, 2, 128
    head_tiles, batch = -(-heads // 64), len(lengths)
    items = S_q * head_tiles
    numbers = np.array([S_q, max(lengths), batch, 1, heads, head_tiles, blocks], np.int64)
    parts = np.full((batch, items, 2), -1, np.int64)
    pieces = np.full((blocks * (2 + batch * items), 6), -1, np.int64)
    counted = np.array(lengths, np.int32)
    constants = {**CONSTANTS, "KS_ITEM_COST": item_cost}
    run(SOURCE, constants, lambda bundle: bundle, numbers, counted, pieces, parts)
    sums = rng.standard_normal((2 * blocks, 64, dim)).astype(np.float32)
    scores = (10 * rng.standard_normal((2 * blocks, 64))).astype(np.float32)
    scores[:, 5], sums[::2, 7], scores[::2, 7] = -np.inf, np.nan, -np.inf
    out = np.full((batch, S_q, heads, dim), np.nan, np.float32)
    lse = np.full((batch, heads, S_q), np.nan, np.float32)
    run(
        MERGE,
        {**constants, "KS_T": "float", "KS_DV": dim, "KS_LSE": 1, "KS_SHARED_BYTES": 8 * dim * 4},
        callable_on_the_host,
        np.array([*numbers, sharing], np.int64),
        counted,
        sums,
        scores,
        out,
        lse,
        config=LaunchConfig((batch * items * 8 * sharing, 1, 1), (128, 1, 1), 8 * dim * 4),
    )
    shared = 0
    for entry, item in np.ndindex(batch, items):
        query, tile = divmod(item, head_tiles)
        rows = min(64, heads - 64 * tile)
        first, last = (int(x) for x in parts[entry, item])
        actual = out[entry, query, 64 * tile : 64 * tile + rows]
        actual_lse = lse[entry, 64 * tile : 64 * tile + rows, query]
        if first == last:
            assert np.isnan(actual).all() and np.isnan(actual_lse).all()
            continue
        shared += 1
        states = [2 * b + (b == first) for b in range(first, last + 1)]
        s = scores[states, :rows].astype(np.float64)
        weights = 2.0 ** (s - np.where(np.isinf(s.max(0)), 0, s.max(0)))
        x = np.where(weights[..., None] > 0, sums[states, :rows], 0).astype(np.float64)
        total = weights.sum(0)
        want = (weights[..., None] * x).sum(0) / np.where(total, total, 1)[:, None]
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-6)
        with np.errstate(divide="ignore"):
            want_lse = np.log(2.0) * (s.max(0) + np.log2(total))
        np.testing.assert_allclose(actual_lse, want_lse, rtol=1e-5, atol=1e-6)
    assert shared, "some item has several blocks"
