"""Bugs planted in Hopper's latent attention, as those of sm90_mutants.py are."""

from __future__ import annotations

from mutant import Mutant

KERNEL, LIST, MERGE = (f"sm90/attention/latent{name}.h" for name in ("", "_list", "_merge"))
CASE = "attention-bf16-576v512-causal-latent"
TWO_QUERIES, PAGES, SPLIT, SPLIT_RAMP = (
    f"{CASE}{what}" for what in ("", "-pages-64", "-split", "-split-ramp")
)
CHUNKS, MORE_QUERIES, HIDDEN = (
    f"{CASE}-{what}" for what in ("chunks-pages-64", "more-queries-than-keys", "nan-in-hidden-k")
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
        LENGTHS,
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
        KERNEL,
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
        KERNEL,
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
)
