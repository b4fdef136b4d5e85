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
  const List list{lengths, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[7]};
  for (int group = 0; group < list.groups; group++) {
    Piece x;
    bool more = first_piece(list, group, x);
    while (more) {
      const int found[] = {group, x.entry, x.item, x.begin, x.end, x.tiles};
      for (int i = 0; i < 6; i++) pieces[i] = found[i];
      pieces += 6;
      more = next_piece(list, x);
    }
  }
  const Cut cut(list);
  for (int b = 0; b < list.batch; b++)
    for (int i = 0; i < list.items_of_entry(); i++, parts += 2) {
      const int first = list.places_before(b) + i * (list.tiles(b) + ITEM_COST) + ITEM_COST;
      parts[0] = cut.taker(first), parts[1] = cut.taker(first + list.tiles(b) - 1);
    }
}"""  # noqa: E501
CONSTANTS = {
    **dict.fromkeys(("WINDOW", "PREFIX", "MASK", "ALIBI", "SOFTCAP", "SINKS"), 0),
    "Q_VIEW": 0,
    "OUT_VIEW": 0,
    "KV_VIEW": 2,
    "LENGTHS": 1,
    "CAUSAL": 1,
    "BIAS": "void",
}
MANY = [int(x) for x in np.exp(np.random.default_rng(3).uniform(0, 9, 40))]


@pytest.mark.parametrize(
    ("lengths", "S_q", "heads", "together", "groups", "item_cost", "whole"),
    [
        ([1], 1, 16, 1, 132, 2, True),
        ([0, 64, 65, 0], 2, 128, 4, 33, 2, False),
        ([32768], 1, 128, 2, 66, 2, False),
        ([4096] * 33, 1, 16, 1, 34, 2, False),
        ([4096] * 33, 1, 64, 1, 34, 2, True),
        ([4096] * 64, 1, 128, 2, 66, 2, True),
        ([4096] * 64, 1, 64, 1, 132, 2, False),
        ([4096] * 131, 1, 64, 1, 66, 2, True),
        ([4096] * 140, 1, 64, 1, 132, 2, False),
        (MANY, 1, 64, 1, 132, 2, False),
        (MANY, 2, 130, 3, 7, 5, False),
    ],
)
def test_every_tile_is_taken_once_and_its_parts_are_found(
    lengths: list[int],
    S_q: int,
    heads: int,
    together: int,
    groups: int,
    item_cost: int,
    whole: bool,
) -> None:
    """``whole``: no item is cut, as all are of one length, rows are full, and that takes hardly
    longer."""
    head_tiles, batch = -(-heads // 64), len(lengths)
    items = S_q * head_tiles // together
    counts = [S_q, max(lengths), batch, 1, heads, head_tiles, together, groups]
    pieces = np.full((groups * (2 + batch * items), 6), -1, np.int64)
    parts = np.full((batch, items, 2), -1, np.int64)
    run(
        SOURCE,
        {**CONSTANTS, "ITEM_COST": item_cost},
        lambda bundle: bundle,
        np.array(counts, np.int64),
        np.array(lengths, np.int32),
        pieces,
        parts,
    )
    found = [tuple(map(int, x)) for x in pieces if x[0] >= 0]
    taken = defaultdict(list)
    for group, entry, item, begin, end, tiles in found:
        assert tiles == max(-(-lengths[entry] // 64), 1) and begin < end <= tiles
        taken[entry, item].append((begin, end, group))
    assert len(taken) == batch * items, "every item, also of no keys"
    states = set()
    for (entry, item), ranges in taken.items():
        tiles = max(-(-lengths[entry] // 64), 1)
        assert [begin for begin, _, _ in ranges] == [0, *(end for _, end, _ in ranges[:-1])]
        assert ranges[-1][1] == tiles
        of_groups = [group for _, _, group in ranges]
        first, last = (int(x) for x in parts[entry, item])
        assert of_groups == list(range(first, last + 1))
        for begin, end, group in ranges:
            if (begin, end) != (0, tiles):
                # latent.h's state of the piece, and state_of's for the merge
                state = 2 * group + (begin == 0)
                assert state == 2 * group + (group == first) and state not in states
                states.add(state)
    assert whole == (not states)
    places = sum((max(-(-n // 64), 1) + item_cost) * items for n in lengths)
    used = min(groups, max(places // (item_cost + 2), 1))
    share = defaultdict(int)
    for group, _, _, begin, end, _ in found:
        share[group] += end - begin
    most = -(-places // used)
    longest = max(share.values())
    assert longest <= most + most // 16 * whole, "no group has more than its part"


MERGE = """
struct float4 { float x, y, z, w; };
#include "sm90/attention/latent_merge.h"
KS_KERNEL(128, 1) probe(const i64* n, const int* lengths, const float* sums, const float* sums_lse, float* out, float* lse) {
  const List list{lengths, (int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[7]};
  const int heads = (int)n[4], S_q = (int)n[0];
  attention_latent_merge_sm90({sums, sums_lse, {out, S_q * heads * Config::DV, Config::DV, heads * Config::DV}, {lse, heads * S_q, S_q}, (int)n[8]}, list);
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
@pytest.mark.parametrize(
    ("lengths", "S_q", "heads", "together"),
    [([700, 0, 3000], 1, 20, 1), ([2000], 2, 70, 4), ([2000, 130], 1, 70, 1), ([5000], 3, 20, 3)],
)
def test_parts_are_joined(
    lengths: list[int], S_q: int, heads: int, together: int, sharing: int
) -> None:
    """Against float64; what one block has whole is left alone, and of parts without a key nothing
    is read."""
    rng, groups, item_cost, dim = np.random.default_rng(1), 9, 2, 128
    head_tiles, batch = -(-heads // 64), len(lengths)
    row_tiles, blocks = S_q * head_tiles, groups * together
    items = row_tiles // together
    numbers = np.array([S_q, max(lengths), batch, 1, heads, head_tiles, together, groups], np.int64)
    parts = np.full((batch, items, 2), -1, np.int64)
    pieces = np.full((groups * (2 + batch * items), 6), -1, np.int64)
    counted = np.array(lengths, np.int32)
    constants = {**CONSTANTS, "ITEM_COST": item_cost}
    run(SOURCE, constants, lambda bundle: bundle, numbers, counted, pieces, parts)
    sums = rng.standard_normal((2 * blocks, 64, dim)).astype(np.float32)
    scores = (10 * rng.standard_normal((2 * blocks, 64))).astype(np.float32)
    scores[:, 5], sums[::2, 7], scores[::2, 7] = -np.inf, np.nan, -np.inf
    out = np.full((batch, S_q, heads, dim), np.nan, np.float32)
    lse = np.full((batch, heads, S_q), np.nan, np.float32)
    run(
        MERGE,
        {**constants, "T": "float", "DV": dim, "LSE": 1, "SHARED_BYTES": 8 * dim * 4},
        callable_on_the_host,
        np.array([*numbers, sharing], np.int64),
        counted,
        sums,
        scores,
        out,
        lse,
        config=LaunchConfig((batch * row_tiles * 8 * sharing, 1, 1), (128, 1, 1), 8 * dim * 4),
    )
    shared = 0
    for entry, row_tile in np.ndindex(batch, row_tiles):
        query, tile = divmod(row_tile, head_tiles)
        item, member = divmod(row_tile, together)
        rows = min(64, heads - 64 * tile)
        first, last = (int(x) for x in parts[entry, item])
        actual = out[entry, query, 64 * tile : 64 * tile + rows]
        actual_lse = lse[entry, 64 * tile : 64 * tile + rows, query]
        if first == last:
            assert np.isnan(actual).all() and np.isnan(actual_lse).all()
            continue
        shared += 1
        states = [2 * (g * together + member) + (g == first) for g in range(first, last + 1)]
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
