"""Bugs planted in Hopper's latent attention, as those of sm90_mutants.py are."""

from __future__ import annotations

from mutant import Mutant

KERNEL, FEW, LIST, MERGE, LOAD, SCALED = (
    f"sm90/attention/latent_{name}.h"
    for name in ("wide", "few", "list", "merge", "load", "scaled_rows")
)
CASE = "attention-bf16-576v512-causal-latent"
TWO_QUERIES, PAGES, SPLIT, SPLIT_RAMP = (
    f"{CASE}{what}" for what in ("", "-pages-64", "-split", "-split-ramp")
)
CHUNKS, MORE_QUERIES, HIDDEN = (
    f"{CASE}-{what}" for what in ("chunks-pages-64", "more-queries-than-keys", "nan-in-hidden-k")
)
PAGES_RAMP = f"{PAGES}-ramp"
ROWS = "attention-bf16-576v512-causal-scaled-rows"
ROWS_PAGES = "attention-bf16-576v512-scaled-rows-pages-64"
LENGTHS, ODD_PAGES = "attention-bf16-576v512-latent-lengths", "attention-f16-576v512-latent-pages-5"


def _mutant(
    name: str, place: str, find: str, plant: str, case: str, what: str, said: str = ""
) -> Mutant:
    return Mutant(
        f"latent-{name}", place, find, plant, case, said, what, implementation="sm90-latent"
    )


MUTANTS = (
    _mutant(
        "scores-not-masked",
        KERNEL,
        "mask_columns(s, {0, 0}, {rows.limit(row(0)) - first, rows.limit(row(1)) - first});",
        "",
        ODD_PAGES,
        "keys behind the last have a score of 0",
    ),
    _mutant(
        "own-columns-not-rescaled",
        KERNEL,
        "if (add) rescale(o, correction);",
        "",
        SPLIT_RAMP,
        "sums of earlier keys keep their reference",
    ),
    _mutant(
        "first-query-sees-all",
        LIST,
        "Config::CAUSAL ? keys - (queries - 1 - query(r)) : keys",
        "keys",
        TWO_QUERIES,
        "a query sees the keys of the next",
    ),
    _mutant(
        "rows-of-one-query",
        LIST,
        "return heads.quotient(first + r);",
        "return heads.quotient(first);",
        CHUNKS,
        "a tile has the heads of its first query alone",
    ),
    _mutant(
        "queries-of-the-first-sequence",
        LOAD,
        "a.q.at<Config::Q_VIEW>(piece.entry, rows.head(r), 0, piece.sequence.q_first)",
        "a.q.at<Config::Q_VIEW>(piece.entry, rows.head(r), 0, 0)",
        CHUNKS,
        "packed queries are those of the first entry",
    ),
    _mutant(
        "items-counted-short",
        LIST,
        "b = (keys - queries + BN) * heads.d + step - 1;",
        "b = (keys - queries) * heads.d + step - 1;",
        CHUNKS,
        "the list ends before the last items",
    ),
    _mutant(
        "items-of-no-keys-forgotten",
        LIST,
        "const int tiles = single + ",
        "const int tiles = ",
        MORE_QUERIES,
        "queries that see no key have no place in the list",
    ),
    _mutant(
        "unseen-values-used",
        KERNEL,
        "x = finite_part<T>(x);",
        "",
        HIDDEN,
        "a NaN reaches rows that do not see its key",
    ),
    _mutant(
        "boxes-by-entry",
        LOAD,
        ", entry = page[0]",
        "",
        PAGES,
        "a tile's page is not looked up for its box",
    ),
    _mutant(
        "first-state-elsewhere",
        LIST,
        ") + (group == first_group)",
        ")",
        SPLIT,
        "what the first block left is not found",
    ),
    _mutant(
        "parts-weigh-the-same",
        MERGE,
        "weight = exp2_fast(s - base);",
        "weight = 1.f;",
        SPLIT,
        "parts are added up without their references",
    ),
    _mutant(
        "weights-fence",
        KERNEL,
        "async_proxy_fence(); named_barrier_arrive",
        "named_barrier_arrive",
        PAGES,
        "the other consumer's products may read P of the tile before",
        "order: no proxy fence between fragments and the meeting that hands them over",
    ),
    _mutant(
        "weights-given-back-early",
        KERNEL,
        "wgmma_wait<0>();\n        named_barrier_arrive(EMPTY, EXCHANGE);",
        "named_barrier_arrive(EMPTY, EXCHANGE);\n        wgmma_wait<0>();",
        SPLIT,
        "P is written over while products read it",
        "order: fragments are given back while products read them",
    ),
    _mutant(
        "copies-fence",
        KERNEL,
        "async_proxy_fence();  // what cp.async wrote",
        "// what cp.async wrote",
        ODD_PAGES,
        "products may read what was in shared memory before keys were copied there",
        "order: no proxy fence between copies by threads and the products that read them",
    ),
    _mutant(
        "scales-of-the-first-half",
        SCALED,
        "row + DV + 8 * N",
        "row + DV",
        ROWS,
        "columns 256 to 511 have the scales of those before",
    ),
    _mutant(
        "one-scale-for-two",
        SCALED,
        "n < OWN / 2 ? from.scales.x : from.scales.y",
        "from.scales.x",
        ROWS,
        "columns 128 to 255 have the scale of those before",
    ),
    _mutant(
        "scales-left-out",
        SCALED,
        "to_sum(f16{(unsigned short)y}) * scale",
        "to_sum(f16{(unsigned short)y})",
        ROWS,
        "every other number stands for itself",
    ),
    _mutant(
        "rotated-columns-at-the-scales",
        SCALED,
        "BEHIND = DV + 4 * (DV / 128)",
        "BEHIND = DV",
        ROWS,
        "scales are read as columns",
    ),
    _mutant(
        "chunks-of-a-row-in-turns",
        SCALED,
        "return first ^ (16 * n);",
        "return first ^ (16 - 16 * n);",
        ROWS,
        "neighbouring chunks change places",
    ),
    _mutant(
        "pages-of-the-tile-before",
        SCALED,
        "at(tile + 1, next, 1), there(tile + 1, 1));\n        state",
        "at(tile + 1, now, 1), there(tile + 1, 1));\n        state",
        ROWS_PAGES,
        "rows of a tile come from the page of the one before",
    ),
    _mutant(
        "rows-fence",
        SCALED,
        "async_proxy_fence();\n    barrier_arrive",
        "barrier_arrive",
        ROWS_PAGES,
        "products may read what was in shared memory before rows were stored there",
        "order: no proxy fence between fragments and the arrival that hands them over",
    ),
    _mutant(
        "few-sums-of-a-warp",
        FEW,
        "for (int w = 1; w < 4; w++) join(x[i], all[w][row(i)]);",
        "for (int w = 1; w < 4; w++) join(x[i], all[0][row(i)]);",
        LENGTHS,
        "all keys weigh as those of the first warp",
    ),
    _mutant(
        "few-other-half-left-out",
        FEW,
        " + x.o[8 * n + i][thread] * other[j];",
        ";",
        PAGES,
        "every other tile counts in the sum alone",
    ),
    _mutant(
        "few-weights-lie-along-rows",
        FEW,
        "stmatrix_transposed(shared_address",
        "stmatrix(shared_address",
        LENGTHS,
        "weights are those of other keys and rows",
    ),
    _mutant(
        "few-not-masked",
        FEW,
        "s[i] = -infinity();",
        "s[i] = s[i];",
        LENGTHS,
        "keys behind the last have a score of 0",
    ),
    _mutant(
        "few-not-rescaled",
        FEW,
        "if (add && __any_sync(~0u, rises))",
        "if (add && false)",
        PAGES_RAMP,
        "sums of earlier keys keep their reference",
    ),
    _mutant(
        "few-weights-fence",
        FEW,
        "async_proxy_fence();\n    meet();",
        "meet();",
        LENGTHS,
        "products may read P of the tile before",
        "order: no proxy fence between fragments and the meeting that hands them over",
    ),
)
