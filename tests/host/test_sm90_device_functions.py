"""What of Hopper's kernels is plain C++ runs on the host: cursors of rings, descriptors of
operands, the walk of tiles.

Each is held against its meaning in Python, and bugs planted there are found
(tests/gpu/mutants/, "words").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from kernelseam.kernels.elements import divider
from kernelseam.kernels.gemm.gemm import NOT_GROUPED
from mutant import Mutant
from mutants import SM90

toolchain_module = pytest.importorskip(
    "kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed"
)
from sm90_probe import TILES_CONSTANTS, Change, Launch, as_it_is, run  # noqa: E402

Ints = npt.NDArray[np.int64]
BM, BN, FIELDS = 64, 32, 13
WORDS = [m for m in SM90 if m.reported == "words"]

CURSORS = """
#include "sm90/wgmma.h"
#include "sm90/pipeline.h"
KS_KERNEL(16, 1) probe(const i64* addresses, i64* turns, i64* descriptors) {
  if (thread_index() != 0) return;
  PipelineState<3> at{0, 1};
  for (int i = 0; i < 12; i++, at.advance()) turns[2 * i] = at.stage, turns[2 * i + 1] = at.parity;
  u64 high = 0;
  for (const char* x = KS_DESCRIPTOR_HIGH + 2; *x; x++) high = 16 * high + (*x <= '9' ? *x - '0' : *x - 'a' + 10);
  for (int i = 0; i < 5; i++) {
    descriptors[3 * i] = high << 32 | descriptor_k_major((u32)addresses[i]);
    descriptors[3 * i + 1] = high << 32 | descriptor_mn_major((u32)addresses[i], 128 * 128);
    descriptors[3 * i + 2] = high << 32 | advanced(descriptor_k_major((u32)addresses[i]), 96);
  }
}"""  # noqa: E501

MATRICES = """
#include "sm90/gemm/matrix.h"
KS_KERNEL(16, 1) probe(const u64* addresses, const u64* origins, i64* places) {
  if (thread_index() != 0) return;
  for (int i = 0; i < 6; i++) {
    const Matrix at = matrix_at((const void*)addresses[i], (const void*)origins[i]);
    places[2 * i] = at.x2, places[2 * i + 1] = at.x3;
  }
}"""

HEADS = """
#include "sm90/gemm/heads.h"
KS_KERNEL(16, 1) probe(const i64* n, i64* columns, i64* parts) {
  if (thread_index() != 0) return;
  const Order order{{(int)n[0], (unsigned)n[1], (int)n[2]}, (int)n[3], (int)n[4]};
  for (int i = 0; i < n[5]; i++) columns[i] = order.element(i, order.in_head(i));
  for (int slices = 4; slices < 20; slices++)
    for (int rank = 0; rank < SPLIT; rank++) {
      const Part part = part_of(slices, rank);
      *parts++ = part.first, *parts++ = part.count;
    }
}"""

NUMBERS = """
#include "sm90/gemm/block.h"
KS_KERNEL(16, 1) probe(const i64* n, i64* found) {
  if (thread_index() != 0) return;
  for (int i = 0; i < n[0]; i++) {
    const i64* const x = n + 1 + 4 * i;
    const OwnNumbers numbers = own_numbers((int)x[0], (int)x[1], (int)x[2], (int)x[3]);
    found[2 * i] = numbers.first, found[2 * i + 1] = numbers.count;
  }
}"""

TILES = """
#include "sm90/attention/tiles.h"
KS_KERNEL(16, 1) probe(const i64* n, const int* q_offsets, const int* k_offsets, const int* lengths, i64* out) {
  if (thread_index() != 0 && !BY_WARP) return;
  ScoreArguments score{};
  score.left = (int)n[9], score.right = (int)n[10], score.scale_log2 = 1.f;
  const VisitedBlocks visited{};
  TileScheduler<64 / GROUP_HEADS * GROUP_HEADS, 32> scheduler{{(int)n[0], (int)n[1], (int)n[2], (int)n[3], (int)n[4], (int)n[5], (int)n[6], (int)n[12]},
                          {lengths, q_offsets, k_offsets, (int)n[7], (int)n[8]}, score, visited};
  scheduler.list = (int)n[13];
  for (int t = 0; t < (int)n[11]; t++) {
    WorkTile w{};
    if (!scheduler.next(t, w)) return;
    const int found[] = {w.batch, w.head, w.kv_head, w.row, w.begin, w.end, w.unmasked_begin, w.unmasked_end, w.S_q, w.S_k,
                         w.q_first, w.k_first, w.part};
    for (int i = 0; i < 13 && thread_index() == 0; i++) out[13 * t + i] = found[i];
  }
}"""  # noqa: E501


VISITED = """
#include "sm90/attention/tiles.h"
KS_KERNEL(16, 1) probe(const BlockWord* words, const i64* ranges, i64* out) {
  if (thread_index() != 0) return;
  for (int i = 0; i < 60; i++) {
    const int from = (int)ranges[2 * i], end = (int)ranges[2 * i + 1];
    BlockWord word = words[max_of(end - 1, 0) / 32];
    out[2 * i] = last_visited(words, word, from, end);
    out[2 * i + 1] = first_visited(words, from, end);
  }
}"""

GEMM_CONSTANTS: dict[str, int | str] = {
    "T": "f16",
    "TC": "f16",
    "BIAS": "void",
    "ROW_SUMS": "void",
    "SCALES": 0,
    "SCALE_K": 0,
    "IN_TURNS": 0,
    "HALVES": 0,
    "BM": 128,
    "A_ROWS": 128,
    "A_TRANSPOSED": 0,
    "BN": 128,
    "GROUPS": 2,
    "STAGES": 2,
    "CLUSTER": 1,
    "GROUP_ROWS": 8,
    "SHARED_A": 0,
    "SPLIT": 1,
    "TAIL_SLICES": 0,
    "ADDS_UP": 0,
    "BUFFERS": 2,
    "POINTERS": 1,
    "RESIDUAL": 0,
    "EPILOGUE": 0,
    "REDUCTIONS": 0,
    "PAIRS": 0,
    "SUMMED": 0,
    "CAPTURES": 0,
    "PREACTIVATION": 0,
    "PING_PONG": 0,
    **NOT_GROUPED,
    "HEADS": 0,
    "B_TRANSPOSED": 1,
    "STORE": 0,
    "BLOCKS": 1,
    "C_FIRST": 0,
    "SHARED_BYTES": 1 << 18,
}
"""Of the GEMM's block.h."""


# ---------------------------------------------------------------- rings and descriptors


def check_words(change: Change) -> None:
    # of a cluster: the rank is part of an address, not of a descriptor
    in_second_block = 1 << 24 | 66 * 1024
    addresses = np.array([0, 1024, 66 * 1024, 225 * 1024, in_second_block], np.int64)
    turns, descriptors = np.zeros((12, 2), np.int64), np.zeros((5, 3), np.int64)
    run(CURSORS, {}, change, addresses, turns, descriptors)
    # Stage by stage, the parity another after each turn: what a barrier's phases alternate in.
    assert turns.tolist() == [[i % 3, 1 - i // 3 % 2] for i in range(12)]
    # PTX ISA, "Matrix descriptor format": bits 0-13 address, 16-29 leading and 32-45 stride offset,
    # in 16 bytes each; 62-63 the swizzle, 1 for 128 bytes.
    for address, (k_major, n_major, later) in zip(
        addresses.tolist(), descriptors.tolist(), strict=True
    ):
        for word, more in ((k_major, 0), (n_major, 0), (later, 96)):
            assert word & 0x3FFF == (address % (1 << 24) + more) >> 4
            assert word >> 32 & 0x3FFF == 8 * 128 >> 4, "from eight rows of a panel to the next"
            assert word >> 62 & 3 == 1
        assert n_major >> 16 & 0x3FFF == 128 * 128 >> 4, "from a panel to the next"


# ---------------------------------------------------------------- matrices of a list


def check_matrices(change: Change) -> None:
    """Coordinates within the map's axes, that lead from the origin to the address."""
    origin = 0x7F12_3456_7000
    addresses = np.array(
        [origin + x for x in (0, 16, 3 << 20, -16, -(5 << 20), 40 << 30)], np.uint64
    )
    places = np.zeros((len(addresses), 2), np.int64)
    run(
        MATRICES,
        GEMM_CONSTANTS,
        change,
        addresses,
        np.full(len(addresses), origin, np.uint64),
        places,
    )
    for address, (units, reaches) in zip(addresses.tolist(), places.tolist(), strict=True):
        assert 0 <= units < 2**31 and 0 <= reaches < 2**29
        assert (origin + 16 * units + 2**35 * reaches) % 2**64 == address


# ---------------------------------------------------------------- heads, and parts of a sum


def check_heads(change: Change) -> None:
    """Columns hold each element of their head once, the two that are rotated together 32 columns
    apart; a sum's parts are its slices, one part after the other."""
    dim, rotated, heads, rotated_heads = 192, 128, 5, 4
    magic, shift = divider(dim)
    given = np.array(
        [dim, magic % 2**32, shift, rotated_heads * dim, rotated, heads * dim], np.int64
    )
    columns, parts = np.zeros(heads * dim, np.int64), np.zeros((16, 4, 2), np.int64)
    constants = {
        **GEMM_CONSTANTS,
        "HEADS": 1,
        "ROTARY": 1,
        "PAGED": 0,
        "POSITIONS": 0,
        "STAGES": 7,
        "SHARED_BYTES": 1 << 19,
        "SPLIT": 4,
    }
    run(HEADS, constants, change, given, columns, parts)
    for head, row in enumerate(columns.reshape(heads, dim).tolist()):
        assert sorted(row) == list(range(dim))
        for c in range(dim):
            if head >= rotated_heads or c >= rotated:
                assert row[c] == c, "it is not rotated"
            elif c // 32 % 2 == 0:
                assert row[c] == c // 64 * 32 + c % 32 and row[c + 32] == row[c] + rotated // 2
    for slices, found in enumerate(parts.tolist(), 4):
        walked = [s for first, count in found for s in range(first, first + count)]
        assert walked == list(range(slices))


def check_numbers(change: Change) -> None:
    """The last tile that has parts of a number adds them up, and no other."""
    cases = [
        (of, wide, parts)
        for of in (1, 2, 3, 7, 40)
        for wide in (1, 2, 3, 128)
        for parts in (1, 2, 7, 12, 300)
    ]
    tiles = [(c, t) for c in cases for t in range(-(-c[2] // c[1]) + 1)]  # one is behind all parts
    given = [x for (of, wide, parts), t in tiles for x in (of, t * wide, (t + 1) * wide, parts)]
    found = np.zeros((len(tiles), 2), np.int64)
    run(NUMBERS, GEMM_CONSTANTS, change, np.array([len(tiles), *given], np.int64), found)
    for ((of, wide, parts), t), (first, count) in zip(tiles, found.tolist(), strict=True):
        last = [min((n + 1) * of, parts) - 1 for n in range(-(-parts // of))]
        own = [n for n, part in enumerate(last) if part // wide == t]
        assert [*range(first, first + count)] == own


# ---------------------------------------------------------------- tiles


@dataclass(frozen=True)
class Walk(Launch):
    """Of the forward."""

    last_section: int = 1
    lists: tuple[int, ...] = ()
    """Keys in pages: the lists that are walked, one after the other."""
    group_heads: int = 1
    """Query heads that share a tile's rows."""
    parts: int = 1
    """Of a tile's keys."""
    in_cluster: bool = False
    """Whether a tile's parts follow one another."""


MANY_ROWS, FEW_ROWS, ALL_ROWS = range(3)
CLASSES = 3
"""Of lengths in a list, each of half the keys of the class before."""

WALKS = {
    "plain": Walk(3, 4, 150, 100, head_group=2),
    "causal": Walk(2, 5, 150, 170, causal=True, section=4, last_section=3),
    "causal-masked": Walk(1, 3, 200, 70, causal=True, section=2, last_section=1),
    "window": Walk(2, 2, 130, 200, window=(40, 3)),
    "sequences": Walk(5, 2, 130, 130, q=(70, 0, 64, 130, 1), k=(70, 40, 0, 100, 33)),
    "causal-sequences": Walk(
        5, 3, 130, 130, causal=True, q=(70, 0, 64, 130, 1), k=(90, 40, 7, 100, 33)
    ),
    "shared-rows": Walk(2, 8, 21, 170, 4, causal=True, group_heads=4, section=2, last_section=1),
    "shared-sequences": Walk(
        *(4, 4, 50, 130, 2), q=(50, 3, 0, 17), k=(130, 64, 9, 40), group_heads=2
    ),
    "shared-by-five": Walk(
        2, 10, 30, 170, 5, causal=True, group_heads=5, section=2, last_section=1
    ),
    "shared-by-seven-of-14": Walk(
        *(4, 28, 50, 130, 14), q=(50, 3, 0, 17), k=(130, 64, 9, 40), group_heads=7
    ),
    "parts": Walk(2, 4, 70, 400, 2, parts=3),
    "causal-parts": Walk(2, 4, 100, 130, 2, causal=True, section=3, last_section=2, parts=4),
    "causal-cluster": Walk(
        *(2, 4, 100, 130, 2), causal=True, section=3, last_section=2, parts=4, in_cluster=True
    ),
    "window-parts": Walk(1, 2, 70, 500, window=(100, 20), parts=2),
    "shared-parts-of-sequences": Walk(
        *(3, 8, 40, 200, 8),
        causal=True,
        q=(40, 9, 1),
        k=(200, 20, 64),
        group_heads=8,
        parts=4,
    ),
    "lists": Walk(
        *(40, 4, 130, 130, 2),
        q=(1, 64, 0, 130, 1, 3, 5, 33) * 5,
        k=(32, 65, 0, 130, 66, 33, 40, 35) * 5,
        group_heads=2,
        lists=(MANY_ROWS, FEW_ROWS),
    ),
    "lists-of-three-heads": Walk(
        *(40, 6, 130, 130, 3),
        q=(1, 21, 0, 130, 22, 3, 5, 33) * 5,
        k=(32, 65, 0, 130, 66, 33, 40, 35) * 5,
        group_heads=3,
        lists=(MANY_ROWS, FEW_ROWS),
    ),
    "lists-in-parts": Walk(
        3, 2, 70, 200, causal=True, q=(70, 1, 65), k=(200, 64, 65), lists=(1, 0), parts=2
    ),
    "one-list": Walk(
        *(20, 2, 130, 130),
        causal=True,
        q=(1, 64, 0, 130) * 5,
        k=(66, 65, 0, 130) * 5,
        lists=(ALL_ROWS,),
    ),
}


def check_walk(walk: Walk, change: Change) -> None:
    """Every tile once, each with the blocks of keys that its rows see, and those that they all see
    whole."""
    group, parts = walk.group_heads, walk.parts
    tile_rows = BM // group * group
    heads = [(e, h) for e in range(walk.batch) for h in range(0, walk.heads, group)]
    tiles = [
        (e, h, row) for e, h in heads for row in range(0, walk.lengths(e)[0] * group, tile_rows)
    ]
    offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (walk.q, walk.k)]
    q_tiles = -(-walk.S_q * group // tile_rows)
    left, right = walk.window or (0, 0)
    most = len(tiles) * parts + 3
    given = np.array(
        [
            q_tiles,
            q_tiles * walk.batch * walk.heads // group,
            walk.section,
            walk.last_section,
            walk.batch,
            walk.heads // group,
            walk.head_group // group,
            walk.S_q,
            walk.S_k,
            left,
            right,
            most,
            parts,
        ],
        np.int64,
    )
    packed = int(bool(walk.q))
    constants = {
        **TILES_CONSTANTS,
        "CAUSAL": int(walk.causal),
        "WINDOW": int(walk.window is not None),
        "LENGTHS": int(bool(walk.lists)),
        "Q_VIEW": packed,
        "KV_VIEW": 2 if walk.lists else packed,
        "OUT_VIEW": packed,
        "GROUP_HEADS": group,
        "IN_PARTS": int(parts > 1),
        "IN_CLUSTER": int(walk.in_cluster),
    }
    found = []
    for which in walk.lists or (ALL_ROWS,):
        out = np.full((most, FIELDS), -1, np.int64)
        lengths_k = np.array(walk.k, np.int32)
        asked = np.append(given, which)
        run(TILES, constants, change, asked, *offsets, lengths_k, out)
        own = [tuple(int(x) for x in row) for row in out if row[0] >= 0]
        if which != ALL_ROWS:
            assert all((walk.lengths(e)[0] * group <= BM) == which for e, *_ in own), "of the list"
        if walk.q:
            keys = [walk.lengths(e)[1] for e, *_ in own]
            classes = [sum(n <= walk.S_k >> i for i in range(1, CLASSES)) for n in keys]
            assert classes == sorted(classes), "long sequences before short ones"
        found += own
    expected = sorted((*tile, part) for tile in tiles for part in range(parts))
    assert sorted((e, h, row, x[-1]) for e, h, _, row, *x in found) == expected, "every part once"
    for (
        e,
        h,
        kv_head,
        row,
        begin,
        end,
        open_begin,
        open_end,
        *lengths,
        q_first,
        k_first,
        n,
    ) in found:
        S_q, S_k = walk.lengths(e)
        assert lengths[0] == S_q and kv_head == h // walk.head_group
        first_key = 0 if walk.lists else sum(walk.k[:e])
        assert not walk.q or (q_first, k_first) == (sum(walk.q[:e]), first_key)
        rows = {i // group for i in range(row, min(row + tile_rows, S_q * group))}
        blocks = range(max(-(-S_k // BN), 1))
        seen = [b for b in blocks if any(walk.sees(e, i, j) for i in rows for j in _keys(b, S_k))]
        whole = [
            b
            for b in blocks
            if (b + 1) * BN <= S_k and all(walk.sees(e, i, j) for i in rows for j in _keys(b, S_k))
        ]
        own = seen[len(seen) * n // parts : len(seen) * (n + 1) // parts]  # a part's share of them
        assert (begin, end) == ((own[0], own[-1] + 1) if own else (0, 1)), (
            "from the first to the last that is seen"
        )
        assert lengths[1] == (S_k if own or parts == 1 else 0), "a part without keys has none"
        whole = [b for b in whole if b in own or parts == 1]
        assert [b for b in range(begin, end) if open_begin <= b < open_end] == whole
    if walk.causal and not walk.q:  # the longest of a section first
        once = found[::parts] if walk.in_cluster else found[: len(found) // parts]
        order = [(heads.index((e, h)), row) for e, h, _, row, *_ in once]
        fore, first = len(heads) - walk.last_section, 0
        while first < len(heads):
            width = min(walk.section, fore - first) if first < fore else walk.last_section
            mine, order = order[: width * q_tiles], order[width * q_tiles :]
            assert {index for index, _ in mine} == set(range(first, first + width))
            assert [row for _, row in mine] == sorted((row for _, row in mine), reverse=True)
            first += width


# ---------------------------------------------------------------- blocks that tiles visit


def check_visited(change: Change) -> None:
    """The first and the last visited block of ranges within three words, of which one is empty."""
    draw = np.random.default_rng(7)
    visited = draw.random(128) < 0.2
    visited[32:64] = False
    words = np.zeros((4, 2), np.uint32)
    words[:, 0] = np.packbits(visited, bitorder="little").view(np.uint32)
    ranges = np.sort(draw.integers(0, 129, (60, 2)), axis=1).astype(np.int64)
    out = np.zeros((60, 2), np.int64)
    run(VISITED, TILES_CONSTANTS, change, words, ranges, out)
    for (begin, end), (last, first) in zip(ranges.tolist(), out.tolist(), strict=True):
        there = [b for b in range(begin, end) if visited[b]]
        assert (last, first) == ((there[-1], there[0]) if there else (begin - 1, end))


def _keys(block: int, S_k: int) -> range:
    return range(block * BN, min((block + 1) * BN, S_k))


def test_rings_and_descriptors_are_what_the_hardware_takes() -> None:
    check_words(as_it_is)


def test_a_matrix_of_a_list_is_found_from_any_origin() -> None:
    check_matrices(as_it_is)


def test_columns_hold_heads_and_parts_hold_sums() -> None:
    check_heads(as_it_is)


def test_numbers_are_added_up_by_the_last_tile_of_their_parts() -> None:
    check_numbers(as_it_is)


@pytest.mark.parametrize("name", WALKS)
def test_every_tile_is_found_once_with_its_keys(name: str) -> None:
    check_walk(WALKS[name], as_it_is)


def test_visited_blocks_are_found_in_words() -> None:
    check_visited(as_it_is)


PLACES = {
    "section-width": "causal",
    "head-of-a-tile": "plain",
    "open-blocks": "causal",
    "tile-of-the-next-sequence": "sequences",
    "hidden-tile-ends-all": "causal-masked",
    "class-twice": "lists",
    "tile-in-both-lists": "lists",
    "first-of-the-next-32": "lists",
}
"""Of the bugs in the walk of tiles, one that shows each."""


HEADS_BUGS = {"upper-half-first", "last-part-too-long"}
VISITED_BUGS = {"last-visited-of-the-word", "first-visited-of-the-word"}


@pytest.mark.parametrize("mutant", WORDS, ids=lambda m: m.name)
def test_a_bug_is_found(mutant: Mutant) -> None:
    with pytest.raises(AssertionError):
        if mutant.name in PLACES:
            check_walk(WALKS[PLACES[mutant.name]], mutant)
        elif mutant.name in HEADS_BUGS:
            check_heads(mutant)
        elif mutant.place == "sm90/gemm/block.h":
            check_numbers(mutant)
        elif mutant.name in VISITED_BUGS:
            check_visited(mutant)
        elif mutant.place == "sm90/gemm/matrix.h":
            check_matrices(mutant)
        else:
            check_words(mutant)
