"""The list of work of Hopper's latent attention on the host: who takes which tiles of keys, and
where the parts of an item are found again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam.contract import LaunchConfig, SourceBundle  # noqa: E402
from kernelseam.kernels.elements import divider  # noqa: E402
from sm90_probe import run  # noqa: E402

LIST = """
KS_DEVICE List list_of(const i64* n, const int* lengths, const int* starts) {
  return {{lengths, starts, nullptr, (int)n[0], (int)n[1]}, (int)n[2], (int)n[3], (int)n[4], (int)n[5], {(int)n[6], (unsigned)n[7], (int)n[8]}};
}
"""  # noqa: E501
SOURCE = f"""
#include "sm90/attention/latent_list.h"
{LIST}
KS_DEVICE int item_of(const List& list, const Piece& x) {{ return x.kv_head * list.items(x.sequence).count + x.item; }}
KS_KERNEL(16, 1) probe(const i64* n, const int* lengths, const int* starts, i64* pieces, i64* parts) {{
  const List list = list_of(n, lengths, starts);
  for (int group = 0; group < list.groups; group++) {{
    Piece x;
    bool more = first_piece(list, group, x);
    while (more) {{
      const int found[] = {{group, x.entry, item_of(list, x), x.begin, x.end, x.tiles}};
      for (int i = 0; i < 6; i++) pieces[i] = found[i];
      pieces += 6;
      more = next_piece(list, x);
    }}
  }}
  const Cut cut = cut_of(list);
  for (int place = 0; place < cut.total; place++) {{
    Piece x;
    const int first = place - find_item(list, place, x);
    const int found[] = {{x.entry, item_of(list, x), cut.taker(first), cut.taker(first + x.tiles - 1)}};
    if (place == first)
      for (int i = 0; i < 4; i++) *parts++ = found[i];
  }}
}}"""  # noqa: E501
CONSTANTS = {
    "CLUSTER": 1,
    **dict.fromkeys(("WINDOW", "PREFIX", "MASK", "ALIBI", "SOFTCAP", "SINKS"), 0),
    "Q_VIEW": 0,
    "OUT_VIEW": 0,
    "KV_VIEW": 2,
    "LENGTHS": 1,
    "CAUSAL": 1,
    "BIAS": "void",
}
MANY = [int(x) for x in np.exp(np.random.default_rng(3).uniform(0, 9, 40))]


Items = dict[tuple[int, int], int]


def items_of(
    lengths: list[int],
    queries: list[int],
    heads: int,
    together: int,
    kv_heads: int = 1,
    tile: int = 64,
) -> Items:
    """(entry, item) → tiles of keys: those that the last of its queries sees, one at least."""
    found = {}
    for entry, (keys, count) in enumerate(zip(lengths, queries, strict=True)):
        of_head = -(-count * heads // (tile * together))
        for item in range(of_head * kv_heads):
            rows = min((item % of_head + 1) * tile * together, count * heads)
            seen = keys - (count - 1 - (rows - 1) // heads)
            found[entry, item] = max(-(-seen // 64), 1)
    return found


def divided(
    lengths: list[int], queries: list[int], heads: int, together: int, groups: int, **changes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pieces (group, entry, item, begin, end, tiles), and of each item its first and last
    group. Packed queries, where entries have other numbers of them."""
    kv_heads, tile = changes.get("kv_heads", 1), changes.get("tile", 64)
    items = items_of(lengths, queries, heads, together, kv_heads, tile)
    counts = (max(queries), max(lengths), len(lengths), kv_heads, together, groups, heads)
    pieces = np.full((groups * 2 + len(items), 6), -1, np.int64)
    parts = np.full((len(items), 4), -1, np.int64)
    run(
        SOURCE,
        {
            **CONSTANTS,
            "ITEM_COST": changes["item_cost"],
            "Q_VIEW": int(len(set(queries)) > 1),
            "ROWS": tile,
        },
        lambda bundle: bundle,
        np.array([*counts, *divider(heads)], np.int64),
        np.array(lengths, np.int32),
        np.cumsum([0, *queries], dtype=np.int32),
        pieces,
        parts,
    )
    return pieces[pieces[:, 0] >= 0], parts


RAGGED = [int(x) for x in np.exp(np.random.default_rng(4).uniform(0, 7, 40))]


@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "together", "groups", "item_cost", "kv_heads", "whole", "tile"),
    [
        ([1], 1, 16, 1, 132, 2, 1, True, 64),
        ([0, 64, 65, 0], 2, 128, 4, 33, 2, 1, False, 64),
        ([32768], 1, 128, 2, 66, 2, 1, False, 64),
        ([4096] * 33, 1, 16, 1, 34, 2, 1, True, 64),
        ([4096] * 33, 1, 64, 1, 34, 2, 1, True, 64),
        ([4096] * 64, 1, 128, 2, 66, 2, 1, True, 64),
        ([4096] * 64, 1, 64, 1, 132, 2, 1, False, 64),
        ([4096] * 131, 1, 64, 1, 66, 2, 1, True, 64),
        ([4096] * 140, 1, 64, 1, 132, 2, 1, False, 64),
        (MANY, 1, 64, 1, 132, 2, 1, False, 64),
        (MANY, 2, 130, 3, 7, 5, 1, False, 64),
        ([4096, 1000], 1000, 128, 4, 33, 2, 1, False, 64),
        ([700, 500, 90], 300, 20, 3, 40, 2, 2, False, 64),
        ([5000], 3000, 1, 4, 33, 2, 1, False, 64),
        (MANY, RAGGED, 16, 1, 132, 2, 1, False, 64),
        (MANY, RAGGED, 20, 4, 33, 2, 1, False, 64),
        (MANY[::-1], [0, 0, *RAGGED[:37], 0], 3, 2, 66, 2, 3, False, 64),
        ([4096] * 33, 1, 16, 1, 34, 2, 1, True, 16),
        (MANY, 1, 9, 1, 132, 2, 1, False, 16),
        (MANY, 2, 8, 1, 33, 2, 2, False, 16),
        (MANY, RAGGED, 20, 4, 33, 2, 1, False, 16),
    ],
)
def test_every_tile_is_taken_once_and_its_parts_are_found(
    lengths: list[int],
    queries: int | list[int],
    heads: int,
    together: int,
    groups: int,
    item_cost: int,
    kv_heads: int,
    whole: bool,
    tile: int,
) -> None:
    """``whole``: no item is cut, as all are of one length, and that takes hardly longer."""
    each = [queries] * len(lengths) if isinstance(queries, int) else queries
    items = items_of(lengths, each, heads, together, kv_heads, tile)
    changes = {"item_cost": item_cost, "kv_heads": kv_heads, "tile": tile}
    found, parts = divided(lengths, each, heads, together, groups, **changes)
    taken = defaultdict(list)
    for group, entry, item, begin, end, tiles in found.tolist():
        assert tiles == items[entry, item] and begin < end <= tiles
        taken[entry, item].append((begin, end, group))
    assert set(taken) == set(items), "every item, also of no keys"
    ends = {(entry, item): (first, last) for entry, item, first, last in parts.tolist()}
    states = set()
    for at, ranges in taken.items():
        assert [begin for begin, _, _ in ranges] == [0, *(end for _, end, _ in ranges[:-1])]
        assert ranges[-1][1] == items[at]
        of_groups = [group for _, _, group in ranges]
        first, last = ends[at]
        assert of_groups == list(range(first, last + 1))
        for begin, end, group in ranges:
            if (begin, end) != (0, items[at]):
                # latent.h's state of the piece, and state_of's for the merge
                state = 2 * group + (begin == 0)
                assert state == 2 * group + (group == first) and state not in states
                states.add(state)
    assert whole == (not states)
    places = sum(items.values()) + item_cost * len(items)
    used = min(groups, max(places // (item_cost + 2), 1))
    share = defaultdict(int)
    for group, _, _, begin, end, _ in found.tolist():
        share[group] += end - begin
    most = -(-places // used)
    longest = max(share.values())
    assert longest <= most + most // 16 * whole, "no group has more than its part"


@pytest.mark.parametrize(
    ("keys", "entries", "groups", "parts"), [(4096, 64, 132, 2), (2048, 16, 66, 4), (999, 1, 9, 4)]
)
def test_items_of_one_length_are_cut_into_equal_parts(
    keys: int, entries: int, groups: int, parts: int
) -> None:
    """A group has a part of one item alone: no more of them than have two tiles each."""
    found, _ = divided([keys] * entries, [1] * entries, 16, 1, groups, item_cost=2)
    assert found[:, 0].tolist() == list(range(entries * parts))
    assert (found[:, 1] == np.repeat(np.arange(entries), parts)).all()
    shares = found[:, 4] - found[:, 3]
    assert shares.max() - shares.min() <= 1


def test_without_queries_nobody_has_work() -> None:
    """Packed sequences, all empty; of each of the counts that the host knows 1 is the least."""
    numbers = np.array([1, 9, 2, 1, 1, 4, 16, *divider(16)], np.int64)
    pieces = np.full((4, 6), -1, np.int64)
    arrays = np.array([9, 9], np.int32), np.zeros(3, np.int32), pieces, np.full(4, -1, np.int64)
    constants = {**CONSTANTS, "ITEM_COST": 2, "Q_VIEW": 1, "ROWS": 64}
    run(SOURCE, constants, lambda bundle: bundle, numbers, *arrays)
    assert (pieces == -1).all() and (arrays[3] == -1).all()


MERGE = f"""
struct float4 {{ float x, y, z, w; }};
#include "sm90/attention/latent_merge.h"
{LIST}
KS_KERNEL(128, 1) probe(const i64* n, const int* lengths, const int* starts, const float* sums, const float* sums_lse, float* out, float* lse) {{
  const List list = list_of(n, lengths, starts);
  const int heads = (int)n[6], S_q = (int)n[0];
  attention_latent_merge_sm90({{sums, sums_lse, {{out, S_q * heads * Config::DV, Config::DV, heads * Config::DV}}, {{lse, (int)n[9], (int)n[10]}}}}, list);
}}"""  # noqa: E501


def callable_on_the_host(bundle: SourceBundle) -> SourceBundle:
    """The merge as a function, without the instruction that waits for earlier kernels."""
    changed = [
        (
            name,
            text.replace("KS_KERNEL(THREADS, 3)", "KS_DEVICE void").replace(
                "earlier_kernels_wait();", ""
            )
            if name.endswith("latent_merge.h")
            else text,
        )
        for name, text in bundle.files
    ]
    assert changed != list(bundle.files)
    return replace(bundle, files=tuple(changed))


@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "together", "groups", "size"),
    [
        ([700, 0, 3000], 1, 20, 1, 9, 64),
        ([2000], 2, 70, 3, 9, 64),
        ([2000, 130], 1, 70, 1, 4, 64),
        ([5000], 3, 20, 1, 3, 64),
        ([900, 1300], 40, 20, 4, 5, 64),
        ([700, 20, 1300, 9], [30, 1, 7, 50], 20, 2, 7, 64),
        ([700, 20, 3000], 1, 10, 1, 9, 16),
        ([700, 20, 1300, 9], [30, 1, 7, 50], 20, 2, 7, 16),
    ],
)
def test_parts_are_joined(
    lengths: list[int], queries: int | list[int], heads: int, together: int, groups: int, size: int
) -> None:
    """Against float64; what one block has whole is left alone, and of parts without a key nothing
    is read."""
    rng, item_cost, dim, blocks = np.random.default_rng(1), 2, 128, groups * together
    each = [queries] * len(lengths) if isinstance(queries, int) else queries
    packed, starts = len(set(each)) > 1, np.cumsum([0, *each], dtype=np.int32)
    _, parts = divided(lengths, each, heads, together, groups, item_cost=item_cost, tile=size)
    sums = rng.standard_normal((2 * blocks, size, dim)).astype(np.float32)
    scores = (10 * rng.standard_normal((2 * blocks, size))).astype(np.float32)
    scores[:, 5], sums[::2, 7], scores[::2, 7] = -np.inf, np.nan, -np.inf
    total = int(starts[-1])
    out = np.full((total, heads, dim), np.nan, np.float32)
    lse = np.full((heads, total), np.nan, np.float32)
    counts = (max(each), max(lengths), len(lengths), 1, together, groups, heads, *divider(heads))
    rows = (0, total) if packed else (max(each), total)  # strides of the LSE
    view = int(packed)
    constants = {**CONSTANTS, "ITEM_COST": item_cost, "Q_VIEW": view, "OUT_VIEW": view}
    constants |= {"T": "float", "DV": dim, "LSE": 1, "BLOCKS": 2, "SHARED_BYTES": 8 * dim * 4}
    constants["ROWS"] = size
    run(
        MERGE,
        constants,
        callable_on_the_host,
        np.array([*counts, *rows], np.int64),
        np.array(lengths, np.int32),
        starts,
        sums,
        scores,
        out,
        lse,
        config=LaunchConfig((blocks * 4, 1, 1), (128, 1, 1), 8 * dim * 4),
    )
    shared = 0
    for (entry, item, first, last), member in product(parts.tolist(), range(together)):
        begin = (item * together + member) * size
        tile = [divmod(r, heads) for r in range(begin, min(begin + size, each[entry] * heads))]
        if not tile:
            continue
        tokens, of_heads = starts[entry] + np.array(tile)[:, 0], np.array(tile)[:, 1]
        actual, actual_lse = out[tokens, of_heads], lse[of_heads, tokens]
        if first == last:
            assert np.isnan(actual).all() and np.isnan(actual_lse).all()
            continue
        shared += 1
        states = [2 * (g * together + member) + (g == first) for g in range(first, last + 1)]
        s = scores[states, : len(tile)].astype(np.float64)
        weights = 2.0 ** (s - np.where(np.isinf(s.max(0)), 0, s.max(0)))
        x = np.where(weights[..., None] > 0, sums[states, : len(tile)], 0).astype(np.float64)
        sum_ = weights.sum(0)
        want = (weights[..., None] * x).sum(0) / np.where(sum_, sum_, 1)[:, None]
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-6)
        with np.errstate(divide="ignore"):
            want_lse = np.log(2.0) * (s.max(0) + np.log2(sum_))
        np.testing.assert_allclose(actual_lse, want_lse, rtol=1e-5, atol=1e-6)
    assert shared, "some item has several blocks"
