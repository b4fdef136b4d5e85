"""Bugs planted in what Hopper's attention does by element: see sm90_mutants.py."""

from __future__ import annotations

from mutant import Mutant

CONSUMER, CONSUMER_ROWS, PLANE, PRODUCER, SCORE, TILES, VISIBLE = (
    f"sm90/attention/{name}.h"
    for name in (
        "consumer",
        "consumer_rows",
        "plane",
        "producer",
        "score",
        "tiles",
        "visible_blocks",
    )
)
CASE = "attention-bf16-128-scores"


def _mutant(
    name: str, place: str, find: str, plant: str, case: str, what: str, said: str = ""
) -> Mutant:
    return Mutant(name, place, find, plant, f"{CASE}-{case}", said, what, implementation="sm90")


MUTANTS = (
    Mutant(
        "alibi-falls-in-a-prefix",
        SCORE,
        "(!Config::CAUSAL || Config::PREFIX)",
        "!Config::CAUSAL",
        "attention-bf16-128-causal-alibi-prefix",
        "",
        "behind the diagonal, within a prefix, ALiBi goes on as before it",
        implementation="sm90",
    ),
    _mutant(
        "last-visited-of-the-word",
        TILES,
        "word.some << (31 - (end - 1) % 32)",
        "word.some",
        "far",
        "blocks behind a range's end are found in its last word",
        "words",
    ),
    _mutant(
        "first-visited-of-the-word",
        TILES,
        "some & ~0u << from % 32",
        "some",
        "far",
        "blocks before a range are found in its first word",
        "words",
    ),
    _mutant(
        "bias-of-the-block-before",
        CONSUMER,
        "block = following(begin, arrived());\n    fetch(rows, w, block, begin);",
        "block = following(begin, arrived());",
        "bias-bfloat16-each",
        "a tile's second block takes the bias of the first",
    ),
    _mutant(
        "bias-one-row-off",
        PLANE,
        "lane % 16 * PITCH",
        "(lane % 16 - lane / 8 % 2) * PITCH",
        "bias-bfloat16-each",
        "the second row's bias is that of the row before",
    ),
    _mutant(
        "mask-of-the-block-before",
        CONSUMER,
        "fetch(rows, work_tile(tile), next, begin);",
        "",
        "mask-random",
        "a tile's third block takes the mask of the second",
    ),
    _mutant(
        "mask-one-row-off",
        SCORE,
        "first[8].words",
        "first[7].words",
        "mask-random",
        "the second row sees what the row before does",
    ),
    _mutant(
        "mask-of-four-neighbours",
        VISIBLE,
        "(bits[0] >> 1 & EVEN)",
        "(bits[0] & EVEN)",
        "mask-random",
        "half of the keys of eight are those of the other half",
    ),
    _mutant(
        "row-one-off",
        SCORE,
        "i = query_of(x + 8 * r)",
        "i = query_of(x + 8 * r + 1)",
        "documents",
        "what a mask_mod reads by query is the next query's",
    ),
    _mutant(
        "whole-if-some",
        VISIBLE,
        "keep(at, some, every), atomicAdd",
        "keep(at, some, some), atomicAdd",
        "documents",
        "blocks of which some keys are hidden are not masked",
    ),
    _mutant(
        "whole-if-by-masks",
        PRODUCER,
        "masks && block >= w.unmasked_begin && block < w.unmasked_end",
        "masks",
        "documents",
        "blocks at the diagonal are not masked",
    ),
    _mutant(
        "whole-by-masks",
        PRODUCER,
        "2 * by_masks + all",
        "2 + all",
        "documents",
        "what a mask_mod hides of a block is seen",
    ),
    _mutant(
        "slope-behind-the-diagonal",
        SCORE,
        "row.origin ? -row.slope : row.slope",
        "row.origin ? row.slope : row.slope",
        "slopes",
        "behind the diagonal ALiBi goes on to rise",
    ),
    _mutant(
        "tile-of-another-rank",
        TILES,
        "if (RANKED) tile = visited.rank(entry, head, tile).tile;",
        "if (RANKED) tile = visited.rank(entry, head, max_of(tile - 1, 0)).tile;",
        "documents",
        "the longest tile is computed twice, and the last of the order never",
    ),
    _mutant(
        "keys-of-the-block-before",
        CONSUMER_ROWS,
        "score.ahead<EXACT>(rows, from, whole)",
        "score.ahead<EXACT>(rows, from + BN, whole)",
        "documents",
        "a mask_mod reads what belongs to the keys of the block before",
    ),
    _mutant(
        "bits-of-the-next-distance",
        SCORE,
        "__ballot_sync(~0u, x.words[1] & 1) >> (place - 9)",
        "__ballot_sync(~0u, x.words[1] & 1) >> (place - 8)",
        "dilated",
        "what a mask says of a distance hides keys one further",
    ),
    _mutant(
        "distances-of-the-other-pair",
        SCORE,
        "8 * (r - pair % 2) - e",
        "8 * (r + pair % 2 - 1) - e",
        "relative",
        "a bias by distance is that of the columns eight further",
    ),
    _mutant(
        "shift-of-the-diagonal",
        SCORE,
        "row.origin = (float)(i + own.shift())",
        "row.origin = (float)i",
        "slopes",
        "ALiBi's distances are those of equally many queries and keys",
    ),
)
