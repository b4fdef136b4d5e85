"""Bugs planted in the kernel for few queries over many keys, as in mutants.py."""

from __future__ import annotations

from mutant import BEYOND, DECODE, UNTOUCHED, WRONG, Mutant

BATCHES = "attention-f16-64-split-batches"
SEQUENCES = "attention-f16-64-causal-pages-16"
PAGES = "attention-f16-64-split-pages-ramp"


def _mutant(
    name: str,
    find: str,
    plant: str,
    case: str,
    reported: str,
    what: str,
    build: str = "plain",
    archs: tuple[str, ...] = ("host", "host-registers"),
) -> Mutant:
    return Mutant(
        name, DECODE, find, plant, case, reported, what, build, archs, implementation="decode"
    )


DECODED = (
    # ---- keys and values of 8 bits
    _mutant(
        "decode-stored-k-in-another-order",
        "auto q_operand = EV::template operand<ROWS, Q_STEP>(tile_q, 0, 0);",
        "auto q_operand = E::template operand<ROWS, Q_STEP>(tile_q, 0, 0);",
        "attention-f16-64-e4m3fn-1-query-gqa",
        WRONG,
        "queries are multiplied with other columns of stored keys",
        archs=("host",),
    ),
    _mutant(
        "decode-stored-scales-too-late",
        "copies_wait<AHEAD - 1>(); if (STAGES == 1) warp_barrier();",
        "copies_wait<AHEAD - 1>(); key_scales.loaded = -1; if (STAGES == 1) warp_barrier();",
        "attention-f16-64-e4m3fn-blocks-1-query-gqa",
        UNTOUCHED,
        "scales that were loaded are not stored",
        archs=("host",),
    ),
    # ---- the list, cut
    _mutant(
        "decode-cut-one-short",
        "p.end = p.tile + taken,",
        "p.end = p.tile + taken - 1,",
        BATCHES,
        WRONG,
        "no block takes the last tile of a block's later items",
    ),
    _mutant(
        "decode-begins-at-its-item",
        "piece.tile = piece.entry.first + max_of(at, 0);",
        "piece.tile = piece.entry.first;",
        BATCHES,
        rf"{WRONG}|{UNTOUCHED}",
        "a block takes its first item from the beginning, which others had",
    ),
    _mutant(
        "decode-wrong-heads",
        "if (++p.head == kv_heads) {",
        "if (++p.head > kv_heads) {",
        SEQUENCES,
        rf"{WRONG}|{UNTOUCHED}|launch failed",
        "a sequence has a head too many",
    ),
    _mutant(
        "decode-turns-taken-twice",
        "for (int tile = piece.tile + warp; tile < stop; tile += WARPS) {",
        "for (int tile = piece.tile + warp; tile < stop; tile += WARPS - 1) {",
        BATCHES,
        rf"{WRONG}",
        "warps take tiles that others take, and copies are of others",
    ),
    # ---- joining
    _mutant(
        "decode-a-part-too-few",
        "for (int b = first_block; b <= last_block; b += AT_ONCE) {",
        "for (int b = first_block + 1; b <= last_block; b += AT_ONCE) {",
        BATCHES,
        WRONG,
        "the first block's part is not joined",
    ),
    _mutant(
        "decode-joined-too-early",
        "last = arrive(counter) == last_block - first_block;",
        "last = arrive(counter) == last_block - first_block - 1;",
        "attention-f16-64-split",
        rf"{WRONG}|{UNTOUCHED}| is nan",
        "the last but one to arrive joins, what the last has not yet written",
    ),
    _mutant(
        "decode-warps-not-rescaled",
        "const float other = exp2_fast(m[n] - base);",
        "const float other = 1.f;",
        BATCHES,
        WRONG,
        "states are added whatever maxima they are relative to",
    ),
    _mutant(
        "decode-empty-states-read",
        "y.v[e] += l[n] == 0.f ? 0.f : x[n].v[e] * other;",
        "y.v[e] += x[n].v[e] * other;",
        "attention-f16-64-1-query-gqa-8-2",
        rf"{WRONG}| is nan",
        "a warp without a tile joins what lies in its stage",
    ),
    _mutant(
        "decode-sink-of-no-row",
        "in_base2(sinks[first_head + head_of(r)]);",
        "in_base2(sinks[first_head]);",
        "attention-f16-64-causal-split-sinks",
        WRONG,
        "all heads of a group have the first one's sink",
    ),
    # ---- copies
    _mutant(
        "decode-page-of-the-last-copy",
        "page[i] = table[pages.size.quotient(ahead_key(i))];",
        "page[i] = table[0];",
        PAGES,
        WRONG,
        "every tile lies in the first page",
    ),
    _mutant(
        "decode-stage-overwritten",
        "int next = stage + AHEAD;",
        "int next = stage;",
        BATCHES,
        r"data race|error/tolerance|" + UNTOUCHED,
        "a tile is copied over the one that is multiplied",
        "plain",
        ("host",),
    ),
    _mutant(
        "decode-result-row-too-many",
        "for (int i = thread_index(); i < rows * GROUPS; i += THREADS) { const int r = i / GROUPS, "
        "d = i % GROUPS * COLUMNS; Joined z; float m[WARPS]",
        "for (int i = thread_index(); i < (rows + 1) * GROUPS; i += THREADS) {\n"
        "const int r = i / GROUPS, d = i % GROUPS * COLUMNS;\nJoined z;\nfloat m[WARPS]",
        "attention-bf16-128-causal-nan-in-hidden-v",
        BEYOND,
        "a row behind the last is written",
        "address",
    ),
    # ---- order
    _mutant(
        "decode-states-not-awaited",
        "if (lane() == 0) read_last[warp] = used; block_barrier();",
        "if (lane() == 0) read_last[warp] = used;",
        BATCHES,
        r"data race|exit status 66",
        "states are joined before all warps have left theirs",
        "thread",
    ),
    _mutant(
        "decode-tile-not-awaited",
        "key_scales.land(); warp_barrier();",
        "key_scales.land();",
        BATCHES,
        r"data race",
        "lanes read what others have copied without waiting for them",
        "thread",
    ),
)
