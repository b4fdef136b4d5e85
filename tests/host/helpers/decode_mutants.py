"""Bugs planted in the kernel for few queries over many keys, as in mutants.py."""

from __future__ import annotations

from mutant import DECODE, UNTOUCHED, WRONG, Mutant

BATCHES = "attention-f16-64-split-batches"
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
    # ---- masks of users
    _mutant(
        "decode-mod-wrongly-full",
        "step(tile, !here.whole ||",
        "step(tile,",
        "attention-bf16-128-mod-recent-decoding",
        WRONG,
        "a tile is not masked whose keys not every query sees",
    ),
    # ---- keys and values of 8 bits
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
        "end = tile + taken,",
        "end = tile + taken - 1,",
        BATCHES,
        WRONG,
        "no block takes the last tile of a block's later items",
    ),
    # ---- joining
    _mutant(
        "decode-joined-too-early",
        "- first_block;",
        "- first_block - 1;",
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
        "l[n] == 0.f ? 0.f : x",
        "x",
        "attention-f16-64-1-query-gqa-8-2",
        rf"{WRONG}| is nan",
        "a warp without a tile joins what lies in its stage",
    ),
    # ---- copies
    _mutant(
        "decode-page-of-the-last-copy",
        "pages.size.quotient(ahead_key(i))",
        "0",
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
    # ---- order
    _mutant(
        "decode-states-not-awaited",
        "used; block_barrier();",
        "used;",
        BATCHES,
        r"data race|exit status 66",
        "states are joined before all warps have left theirs",
        "thread",
    ),
)
