"""Bugs planted in Hopper's latent attention, as those of sm90_mutants.py are."""

from __future__ import annotations

from mutant import Mutant

KERNEL, FEW, PANELS, WHOLE, TILES, LIST, MERGE, LOAD, SCALED = (
    f"sm90/attention/latent_{name}.h"
    for name in (
        *("wide", "few", "few_tiles", "few_rows", "tiles", "list", "merge", "load"),
        "scaled_rows",
    )
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
ROWS_PAGES, ROWS_PAIRS = (
    f"attention-bf16-576v512-scaled-rows-{what}" for what in ("pages-64", "sequences")
)
ROWS_SPLIT, ROWS_CHUNKS, ROWS_HIDDEN = (
    f"attention-bf16-576v512-causal-scaled-rows-{what}"
    for what in ("split", "chunks", "few-hidden-nan")
)
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
        ", entry = keys.page[0]",
        "",
        CHUNKS,
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
        TILES,
        "BEHIND = DV + 4 * SCALES",
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
        "keys.look_up(tile + 1);",
        "if (tile < 0) keys.look_up(tile + 1);",
        ROWS_CHUNKS,
        "rows of a tile come from the page of the one before",
    ),
    _mutant(
        "rows-fence",
        SCALED,
        "async_proxy_fence();\n    if (CLUSTER == 1)",
        "if (CLUSTER == 1)",
        ROWS,
        "products may read what was in shared memory before rows were stored there",
        "order: no proxy fence between fragments and the arrival that hands them over",
    ),
    _mutant(
        "own-half-copied-nowhere",
        SCALED,
        "panel_of<N>(thread) * PANEL_BYTES + cluster_rank() * BYTES;",
        "panel_of<N>(thread) * PANEL_BYTES;",
        ROWS_PAIRS,
        "a block of a pair gets the wrong half of what the other converted",
    ),
    _mutant(
        "few-sums-of-a-warp",
        FEW,
        "for (int w = 1; w < 4; w++) join(x[i], all[w][row_of(i)]);",
        "for (int w = 1; w < 4; w++) join(x[i], all[0][row_of(i)]);",
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
        WHOLE,
        "stmatrix_transposed(weights(b)",
        "stmatrix(weights(b)",
        ROWS_PAGES,
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
        PANELS,
        "T()));\n    async_proxy_fence();",
        "T()));",
        PAGES,
        "products may read P of the tile before",
        "order: no proxy fence between fragments and the meeting that hands them over",
    ),
    _mutant(
        "few-release-fence",
        WHOLE,
        "async_proxy_fence();\n    warp_barrier();\n    if (thread_lane == 0)",
        "warp_barrier();\n    if (thread_lane == 0)",
        ROWS_PAGES,
        "the next tile may come while this one's rows are read",
        "order: no proxy fence between fragments that were read and the meeting of readers",
    ),
    _mutant(
        "few-scale-of-the-first-block",
        WHOLE,
        "load_float(row + DV + 4 * b)",
        "load_float(row + DV)",
        ROWS_PAGES,
        "scores have the scale of the first 128 columns for all",
    ),
    _mutant(
        "few-weights-of-the-first-block",
        WHOLE,
        "ldmatrix(weights(warp)",
        "ldmatrix(weights(0)",
        ROWS_PAGES,
        "values have the scale of the first 128 columns for all",
    ),
    _mutant(
        "few-units-twice",
        WHOLE,
        "(int)((127u << 23) - (now - before))",
        "(int)((128u << 23) - (now - before))",
        ROWS_SPLIT,
        "sums of earlier keys count twice as much",
    ),
    _mutant(
        "few-query-units-left-out",
        WHOLE,
        "const float unit = storage.query_units[row_of(i)];",
        "const float unit = 1.f;",
        ROWS_PAGES,
        "scores are those of queries of another size",
    ),
    _mutant(
        "few-values-change-places",
        WHOLE,
        "m % 2 ? 0x7362 : 0x5140",
        "m % 2 ? 0x5140 : 0x7362",
        ROWS_PAGES,
        "pairs of columns change places",
    ),
    _mutant(
        "few-unseen-values-used",
        WHOLE,
        "x = {numbers(x.x), numbers(x.y), numbers(x.z), numbers(x.w)};",
        "",
        ROWS_HIDDEN,
        "a NaN reaches a row that does not see its key",
    ),
)
