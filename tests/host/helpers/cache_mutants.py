"""Bugs planted in what moves rows between tokens and pages, as in mutants.py."""

from __future__ import annotations

from mutant import HOST, NOT_EXACT, STRAY, UNTOUCHED, WRONG, Mutant

CACHE = "cache/"
_FN = ("host",)
"""Where e4m3 is float8_e4m3fn."""

CACHES = (
    Mutant(
        "cache-positions-before-the-append",
        CACHE,
        "lengths[entry] - (end - s)",
        "lengths[entry] + s - begin",
        "paged-cache-append-f16-packed-lengths",
        f"{UNTOUCHED}|{STRAY}",
        "lengths are taken for those before the append",
    ),
    Mutant(
        "cache-row-of-no-sequence",
        CACHE,
        "if (entry < 0 || entry >= sequences) return {};",
        "entry = max_of(entry, 0);",
        "paged-cache-append-f16-packed-own-number",
        STRAY,
        "rows before the first sequence are written",
    ),
    Mutant(
        "cache-negative-slot",
        CACHE,
        "if (slot < 0 || slot >= (i64)pages * page.d) return {};",
        "if (slot < 0) return {true, 0, 0, position};",
        "paged-cache-append-bf16-slots",
        f"{STRAY}|{NOT_EXACT}",
        "tokens without a place are written",
    ),
    Mutant(
        "cache-slots-of-32-bits",
        CACHE,
        "Config::SLOTS == 8 ?",
        "false ?",
        "paged-cache-append-bf16-slots64",
        f"{UNTOUCHED}|{STRAY}",
        "slots of 64 bits are read by halves",
    ),
    Mutant(
        "cache-rotated-the-other-way",
        CACHE,
        "y = y * c + first * s;",
        "y = y * c - first * s;",
        "paged-cache-append-f16-rotary",
        WRONG,
        "second halves are rotated the other way",
    ),
    Mutant(
        "cache-half-of-a-pair-apart",
        CACHE,
        "i < HALF ? i + side * HALF",
        "i < HALF ? 2 * i + side",
        "paged-cache-append-f16-rotary",
        WRONG,
        "neighbouring chunks are rotated as if they were half a row apart",
    ),
    Mutant(
        "cache-rotated-before-the-norm",
        CACHE,
        "x[j][side][e] *= factor * to_sum(w[j][side].v[e]);",
        "x[j][side][e] *= factor * to_sum(w[j][0].v[e]);",
        "paged-cache-append-f32-norm-rotary",
        WRONG,
        "second halves have the weights of the first",
    ),
    Mutant(
        "cache-groups-of-one-head",
        CACHE,
        "own - q_groups - kv_groups : own - q_groups) * HEADS;",
        "own - q_groups - kv_groups : own - q_groups) * 1;",
        "paged-cache-append-f16-norm",
        UNTOUCHED,
        "groups of heads overlap",
    ),
    Mutant(
        "cache-norm-of-a-lane",
        CACHE,
        "for (int m = 1; m < LANES; m *= 2) sum +=",
        "for (int m = 1; m < LANES / 2; m *= 2) sum +=",
        "paged-cache-append-f16-norm",
        WRONG,
        "a norm sums half of its row",
    ),
    Mutant(
        "cache-scale-of-positive-numbers",
        CACHE,
        "maximum(most, maximum(x[j][side][e], -x[j][side][e]))",
        "maximum(most, x[j][side][e])",
        "paged-cache-append-bf16-e4m3-tokens",
        WRONG,
        "a scale is that of the largest number, not of the largest magnitude",
        archs=_FN,
    ),
    Mutant(
        "cache-elements-beyond-the-row",
        CACHE,
        "if (column < dim) *(Elements<X>*)(to + column) = from[j][side];",
        "*(Elements<X>*)(to + column) = from[j][side];",
        "paged-cache-append-f32-e4m3-narrow",
        STRAY,
        "elements beyond a row are written",
        archs=_FN,
    ),
    Mutant(
        "cache-e4m3-cut-off",
        HOST,
        "(y + 0x7ffffu + (y >> 20 & 1)) >> 20",
        "y >> 20",
        "paged-cache-append-bf16-e4m3-unscaled",
        WRONG,
        "numbers are cut off, not rounded",
        archs=_FN,
    ),
)
