"""Bugs planted in the device sources, and the parity case that kills each: what the tests are worth.

Every row is bound to a few words of a source. Where that source is changed so that the words are gone, the row has to
be changed too, such that it plants the same bug in what stands there now; never deleted because it no longer fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kernelseam.contract import SourceBundle


@dataclass(frozen=True)
class Mutant:
    """One bug. Run with a sanitizer, or without one (``sanitizer`` "none") as the matrix runs the case."""

    name: str
    place: str
    """Where the words are: the start of the include names of the files to look in."""
    find: str
    """The words, of which white space counts as any white space; they must be there exactly once."""
    plant: str
    """What stands there instead."""
    case: str
    """The parity case that kills it."""
    reported: str
    """Regular expression, found in what the verdict says, or the whole of what a sanitizer or the launch reports."""
    what: str
    """What is wrong with it."""
    sanitizer: str = "none"
    archs: tuple[str, ...] = ("host", "host-registers")
    """Where it does harm. On the other archs of the host it does none."""

    def found(self, files: Mapping[str, str]) -> list[tuple[str, int, int]]:
        """(file, start, end) of every place where the words are."""
        words = re.compile(r"\s+".join(re.escape(w) for w in self.find.split()))
        return [
            (name, m.start(), m.end()) for name in sorted(files) if name.startswith(self.place)
            for m in words.finditer(files[name])
        ]

    def planted(self, files: Mapping[str, str]) -> dict[str, str]:
        """The files with the bug in one of them. Raises LookupError unless the words are there exactly once."""
        places = self.found(files)
        if len(places) != 1:
            where = ", ".join(name for name, *_ in places) or "nowhere"
            raise LookupError(
                f"mutant {self.name} ({self.what}): its words must be once in {self.place}*, they are {where}: "
                f"{self.find!r}. The source has changed: change this row of tests/host/mutants.py so that it plants "
                "the same bug in what stands there now"
            )
        (name, start, end), = places
        return {**files, name: files[name][:start] + self.plant + files[name][end:]}

    def __call__(self, made: SourceBundle) -> SourceBundle:
        """The bundle with the bug."""
        return replace(made, files=tuple(sorted(self.planted(dict(made.files)).items())))


SANITIZED = (
    "gemm-f16-nt", "gemm-bf16-tn", "gemm-f32-nn-unaligned", "gemm-f64-tn", "gemm-f32-nn-pointers",
    "gemm-f32-nn-k-0-beta-half", "attention-f16-64-causal-65x65", "attention-bf16-128-causal-nan-in-hidden-v",
    "attention-f32-64-causal", "attention-f16-192v128", "attention-f16-64-odd", "attention-f16-64-pages-1-full",
    "attention-f16-64-causal-split-sinks", "attention-f16-64-causal-sequences-everything",
    "attention-bf16-576v512-causal-1-query-mqa", "attention-bwd-f16-64-causal-mqa-5",
    "attention-bwd-f32-64-causal-bias-window", "attention-bwd-bf16-192v256-causal",
)
"""Cases that cover the sources, in which sanitizers find nothing: what they report of a mutant is the bug."""

# Where to look: a folder's files, or one file.
GEMM, ATTENTION, BASE, SIMT = "gemm/", "attention/", "tile/base.h", "tile/simt.h"
HOST, WARPS = "platform.h", "host/warps.h"

# What kills: words of verdicts, and what sanitizers call it.
WRONG = r"error/tolerance (?!inf)"
NOT_EXACT = r"tolerance 0: error/tolerance inf"
NAN, INFINITE = r" is nan, the oracle says -?\d", r" is -inf, the oracle says -?\d"
FINITE = r" is -?\d\S*, the oracle says (nan|-inf)"
STRAY = r"bytes outside the output changed"
UNTOUCHED = r"hold what memory starts with: never written, or computed from memory outside the operands"
RACE, BEYOND = "data race", "heap-buffer-overflow"
DIRECT, REGISTERS = ("host",), ("host-registers",)

WRONG_NUMBERS = (
    # ---- GEMM: what is summed
    Mutant(
        "gemm-k-tail-not-masked", GEMM, "copy_a.fetch(tile_a(far), A, m0, M, k0, K)",
        "copy_a.fetch(tile_a(far), A, m0, M, k0, k0 + BK)", "gemm-f16-nt", NAN, "columns of A beyond K are summed",
    ),
    Mutant(
        "gemm-last-summand-dropped", GEMM, "copy_a.fetch(tile_a(far), A, m0, M, k0, K)",
        "copy_a.fetch(tile_a(far), A, m0, M, k0, K - 1)", "gemm-f16-nt-integers", NOT_EXACT,
        "column K − 1 of A is lost",
    ),
    Mutant(
        "gemm-last-slice-dropped", GEMM, "slices = divide_up(K, BK)", "slices = K / BK", "gemm-f16-nt", WRONG,
        "a slice that is not full is lost",
    ),
    Mutant(
        "gemm-half-sums", HOST, "acc.x[r][c] += a.x[r][k + e] * x[e];",
        "acc.x[r][c] = to_sum(convert<T>(acc.x[r][c] + a.x[r][k + e] * x[e]));", "gemm-f16-nt-to-f32", WRONG,
        "sums are kept in half precision",
    ),
    Mutant(
        "gemm-cut-off", HOST, "magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)", "magnitude - 0x38000000u",
        "gemm-f16-nt-integers-rounded", NOT_EXACT, "results are cut off, not rounded",
    ),
    Mutant(
        "simt-last-chunk-dropped", SIMT, "for (int k = 0; k < K; k += KV) {", "for (int k = 0; k < K - KV; k += KV) {",
        "gemm-f32-nn-integers", NOT_EXACT, "the last summands of every step are lost",
    ),
    # ---- GEMM: what meets what, and where it lies
    Mutant(
        "gemm-stride-of-the-wrong-operand", GEMM, "B{nullptr, b_row}", "B{nullptr, a_row}", "gemm-f32-nn", WRONG,
        "rows of B are taken A's stride apart",
    ),
    Mutant(
        "gemm-batch-stride-ignored", GEMM, "at.batch * by_batch +", "", "gemm-f16-nt", UNTOUCHED,
        "every batch is the first",
    ),
    Mutant(
        "gemm-wrong-b-head", GEMM, "at.head / group", "at.head % group", "gemm-f16-nt-b-group-2", WRONG,
        "heads that share a B take another's",
    ),
    Mutant(
        "gemm-wrong-address-of-a-list", GEMM, "(i64)at.batch * num_heads + at.head", "(i64)at.batch + at.head",
        "gemm-f16-nt-pointers", UNTOUCHED, "a list is not walked batch by batch",
    ),
    Mutant(
        "gemm-carry-missed", GEMM, "head += step.head + carry(n, step.tiles_n);", "head += step.head;", "gemm-f16-nt",
        UNTOUCHED, "a block that stays does not come to the next head", archs=DIRECT,
    ),
    Mutant(
        "gemm-warps-take-the-wrong-columns", GEMM, "tile_b(stage), warp_n, k)", "tile_b(stage), 0, k)", "gemm-f16-nt",
        WRONG, "all warps multiply the tile's first columns",
    ),
    # ---- GEMM: alpha, beta, and what is written
    Mutant(
        "gemm-beta-read-at-0", GEMM, "if (beta != Sum(0))", "", "gemm-f16-nn-beta-0-nan-in-c", NAN,
        "C is read and multiplied by a beta of 0",
    ),
    Mutant(
        "gemm-alpha-ignored", GEMM, "if (alpha != Sum(1))", "if (false)", "gemm-f16-nn-alpha-half", WRONG,
        "alpha is taken for 1",
    ),
    Mutant(
        "gemm-column-too-many", GEMM, "row0, M, col0, N);", "row0, M, col0, N + 1);", "gemm-f16-nt-gaps", STRAY,
        "column N is written",
    ),
    Mutant(
        "tile-row-too-many", BASE, "row0 + Tile::ROWS <= row_end && ", "", "gemm-f16-nt-gaps", STRAY,
        "a tile that reaches beyond the last row is written whole",
    ),
    Mutant(
        "tile-whole-chunks-only", BASE, "VECTOR == 16 && left >= V", "VECTOR == 16", "gemm-f16-nt-ragged-65x129x7",
        STRAY, "the last columns are written 16 bytes at once, however few they are",
    ),
    # ---- attention: which keys a query sees
    Mutant(
        "attention-last-key-dropped", ATTENTION, "seen = seen && j < S_k;", "seen = seen && j < S_k - 1;",
        "attention-f16-64-no-lse-ramp", WRONG, "the last key is hidden",
    ),
    Mutant(
        "attention-tail-not-masked", ATTENTION, "seen = seen && j < S_k;", "", "attention-f32-64-no-lse", WRONG,
        "the zeros that fill the last tile of keys have weight",
    ),
    Mutant(
        "attention-causal-off-by-one", ATTENTION, "!KS_CAUSAL || d <= 0", "!KS_CAUSAL || d <= 1",
        "attention-f16-64-causal-no-lse-ramp", WRONG, "a query sees one key too many",
    ),
    Mutant(
        "attention-causal-one-short", ATTENTION, "!KS_CAUSAL || d <= 0", "!KS_CAUSAL || d < 0",
        "attention-f16-64-causal-no-lse-ramp", WRONG, "a query does not see its own key",
    ),
    Mutant(
        "attention-causal-top-left", ATTENTION, "return S_k - S_q;", "return 0;", "attention-f16-64-causal-7x129", WRONG,
        "the mask is aligned at the top left",
    ),
    Mutant(
        "attention-diagonal-not-masked", ATTENTION, "scores.all_end(i0) / BN", "scores.all_end(i1) / BN",
        "attention-f16-64-causal-65x65", WRONG, "tiles on the diagonal take the way without masks",
    ),
    Mutant(
        "attention-window-off-by-one", ATTENTION, "d >= -left &&", "d >= -left - 1 &&", "attention-f16-64-window-16-0",
        WRONG, "a window shows one key too many",
    ),
    Mutant(
        "attention-window-edge-not-masked", ATTENTION, "tile >= all_begin && tile < all_end", "tile < all_end",
        "attention-f16-64-window-16-0", WRONG, "tiles on a window's left edge take the way without masks",
    ),
    Mutant(
        "attention-prefix-ignored", ATTENTION, "if (KS_PREFIX) seen = seen || j < prefix;", "",
        "attention-f16-64-causal-prefix", WRONG, "keys of a prefix are hidden from queries before them",
    ),
    Mutant(
        "attention-prefix-tiles-skipped", ATTENTION, "KS_PREFIX ? max_of(band_end(i1), prefix) : band_end(i1)",
        "band_end(i1)", "attention-f16-64-causal-prefix", WRONG, "tiles of a prefix beyond the diagonal are not walked",
    ),
    Mutant(
        "attention-mask-inverted", ATTENTION, "seen = mask.at(", "seen = !mask.at(", "attention-f16-64-mask", WRONG,
        "a mask hides what it is to show",
    ),
    Mutant(
        "attention-mask-transposed", ATTENTION, "mask_head, mask_head, mask_row, mask_column",
        "mask_head, mask_head, mask_column, mask_row", "attention-f16-64-mask-odd-transposed", WRONG,
        "a mask's rows are taken for its columns",
    ),
    Mutant(
        "attention-lengths-ignored", ATTENTION, "s.S_k = min_of(lengths[batch], s.S_k);", "",
        "attention-f16-64-lengths", NAN, "keys beyond an entry's length are seen",
    ),
    # ---- attention: what it reads
    Mutant(
        "attention-wrong-kv-head", ATTENTION, "kv_head = KS_GROUPED ? head : head / head_group",
        "kv_head = KS_GROUPED ? head : head % (num_heads / head_group)", "attention-f16-64-causal-batch-invariant", WRONG,
        "a group of query heads takes another's keys",
    ),
    Mutant(
        "attention-wrong-head-of-a-group", BASE, "i64 outer, inner; KS_DEVICE T* row(int i) const {",
        "i64 outer, inner; KS_DEVICE T* row(int i) const { i = i % 2 ? i - 1 : i;", "attention-f16-64-1-query-gqa-8-2",
        UNTOUCHED, "every second row of a group is the one before",
    ),
    Mutant(
        "attention-first-head's-slope", ATTENTION, "scores.score(x, head_of(mine + r),", "scores.score(x, 0,",
        "attention-f16-64-causal-alibi-gqa", WRONG, "all heads of a group have the first one's slope",
    ),
    Mutant(
        "attention-stride-of-the-wrong-operand", ATTENTION, "KeyView K{k_base, k_row}", "KeyView K{k_base, v_row}",
        "attention-f16-192v128", WRONG, "rows of K are taken V's stride apart",
    ),
    Mutant(
        "attention-value-read-past-end", ATTENTION, "V, tile * BN, own.S_k, 0", "V, tile * BN, own.S_k + 1, 0",
        "attention-f16-64", NAN, "what lies behind V is multiplied with a weight of 0",
    ),
    Mutant(
        "attention-wrong-page", BASE, "table[n] *", "table[max_of(n - 1, 0)] *", "attention-f16-64-pages-16", WRONG,
        "keys are looked for in the page before theirs",
    ),
    Mutant(
        "attention-wrong-columns", ATTENTION, "tile_v(stage), column0, 0)", "tile_v(stage), 0, 0)",
        "attention-bf16-576v512-causal-mqa", WRONG, "warps that share rows all make the first columns",
    ),
    # ---- attention: what it writes, and parts of the keys
    Mutant(
        "attention-lse-of-the-wrong-sequence", ATTENTION, "lse[at + own.q_first +", "lse[at +",
        "attention-f16-64-sequences", UNTOUCHED, "the LSE of every sequence is written where the first one's belongs",
    ),
    Mutant(
        "attention-splits-overlap", ATTENTION, "min_of(last, first + share)", "min_of(last, first + share + 1)",
        "attention-f16-64-split", WRONG, "a tile of keys counts in two parts",
    ),
    Mutant(
        "attention-sink-in-every-part", ATTENTION, "if (KS_SINKS && split == 0) { E::Row<ROWS> own_share",
        "if (KS_SINKS) { E::Row<ROWS> own_share", "attention-f16-64-causal-split-sinks", NAN,
        "a sink counts in every part of the keys",
    ),
    Mutant(
        "merge-not-weighted", ATTENTION, "weight = exp2_fast(1.44269504f * (x - top))", "weight = 1.f",
        "merge-states-f32-f16", WRONG, "parts count alike, whatever their LSE",
    ),
    # ---- attention: what is done to a score
    Mutant(
        "attention-alibi-sign", ATTENTION, "x -= slopes[", "x += slopes[", "attention-f16-64-alibi", WRONG,
        "distant keys are preferred",
    ),
    Mutant(
        "attention-bias-capped", ATTENTION, "inside(j, S_k)))); return x;",
        "inside(j, S_k)))); if (KS_SOFTCAP) x = cap * tanh_fast(x / cap); return x;", "attention-f16-64-everything", WRONG,
        "the cap is applied to what a bias has changed",
    ),
    # ---- attention: the softmax and its state
    Mutant(
        "attention-rescale-missed", ATTENTION, "E::row_apply(o, fade, [](float x, float y) { return x * y; });", "",
        "attention-f16-64-climbing", WRONG, "the output is not rescaled when the maximum grows",
    ),
    Mutant(
        "attention-sum-not-rescaled", ATTENTION, "E::zip(l, l, fade, [](float x, float y) { return x * y; });", "",
        "attention-f16-64-climbing", WRONG, "the sum of the weights is not rescaled when the maximum grows",
    ),
    Mutant(
        "attention-no-maximum", ATTENTION, "x == -infinity() ? 0.f : x * c", "0.f", "attention-f32-64-falling",
        INFINITE, "scores are exponentiated without subtracting their maximum",
    ),
    Mutant(
        "attention-infinity-minus-itself", ATTENTION, "x == -infinity() ? 0.f : x * c", "x * c",
        "attention-f16-64-minus-inf-all", NAN, "−∞ is subtracted from −∞ where no key has weight",
    ),
    Mutant(
        "attention-empty-row-divides", ATTENTION, "x == 0.f ? 0.f : 1.f / x", "1.f / x",
        "attention-f16-64-causal-masked-rows", NAN, "a row without weight is divided by 0",
    ),
    Mutant(
        "attention-sign-of-scale-ignored", ATTENTION, "if (scale_log2 <= 0)", "if (false)",
        "attention-f16-64-scale-negative", WRONG, "a negative scale is taken for a positive one",
    ),
    Mutant(
        "attention-lse-base-2", ATTENTION, "0.69314718056f * (x * c", "(x * c", "attention-f16-64", WRONG,
        "the LSE is a logarithm to base 2",
    ),
    Mutant(
        "simt-sum-of-one-lane", SIMT, "a.x[r] += shuffle_xor(a.x[r], m);", "a.x[r] += a.x[r];", "attention-f32-64",
        WRONG, "a lane takes its own share of a row's sum for its neighbour's",
    ),
    Mutant(
        "simt-maximum-of-one-lane", SIMT, "v = maximum(v, shuffle_xor(v, m));", ";", "attention-f32-64", WRONG,
        "lanes of a row subtract different maxima",
    ),
    # ---- attention: values that are not finite
    Mutant(
        "attention-hidden-times-zero", ATTENTION, "if constexpr (HIDES && masked.value) hidden",
        "if (false) hidden", "attention-f16-64-causal-nan-in-hidden-v", NAN,
        "a NaN in V is multiplied with the weight 0 of a hidden key",
    ),
    Mutant(
        "attention-taken-out-for-good", ATTENTION, "if (hidden) {", "if (false) {",
        "attention-f16-64-causal-nan-in-hidden-v", FINITE, "a NaN in V does not reach the rows that see it",
    ),
    Mutant(
        "tile-infinity-not-taken-out", BASE, "return x - x == 0;", "return x == x;",
        "attention-bf16-128-causal-nan-in-hidden-v", NAN, "an infinity in V is multiplied with a weight of 0",
    ),
    # ---- gradients
    Mutant(
        "backward-dots-missed", ATTENTION, "p * (x - line[STEP + c])", "p * x", "attention-bwd-f16-64", WRONG,
        "of what reaches a score its row's mean is not taken off",
    ),
    Mutant(
        "backward-slope-missed", ATTENTION,
        "if constexpr (KS_SOFTCAP) E::map2(dp, slope, [](int, int, float x, float y) { return x * y; }); "
        "E::mma(gradient,", "E::mma(gradient,", "attention-bwd-f16-64-softcap-5", WRONG,
        "the cap's slope does not count for the queries",
    ),
    Mutant(
        "backward-scale-missed", ATTENTION, "E::map(gradient, [=](int, int, float x) { return x * scale; });", "",
        "attention-bwd-f16-64", WRONG, "dq is not scaled",
    ),
    Mutant(
        "backward-group-not-summed", ATTENTION, "? (head + 1) * head_group : 0", "? head * head_group + 1 : 0",
        "attention-bwd-f16-64-gqa-6-2", WRONG, "keys take what the first head of their group gives",
    ),
    Mutant(
        "backward-diagonal-skipped", ATTENTION, "max_of(0, own0 - shift -", "max_of(0, own0 + OWN - shift -",
        "attention-bwd-f16-64-causal-130x130", WRONG, "keys do not meet the queries on the diagonal",
    ),
    Mutant(
        "backward-window-too-short", ATTENTION, "j1 - shift + left + 1", "own0 - shift + left + 1",
        "attention-bwd-f16-64-window-16-0", WRONG, "later queries of a window do not meet their keys",
    ),
    Mutant(
        "backward-keys-beyond-the-length", ATTENTION, "(HIDES || KS_LENGTHS) && !(", "HIDES && !(",
        "attention-bwd-f16-64-lengths", WRONG, "keys beyond an entry's length have gradients",
    ),
    Mutant(
        "row-dots-columns-lost", ATTENTION, "d < KS_DV; d += WARP", "d < KS_DV; d += 2 * WARP", "attention-bwd-f16-64",
        WRONG, "half of a row's columns are left out of its sum",
    ),
    Mutant(
        "sum-axis-missed", ATTENTION, "from[j0 * x0 + j1 * x1 + j2 * x2 +", "from[j0 * x0 + j1 * x1 +",
        "attention-bwd-f16-64-bias-by-key", WRONG, "a bias of all queries takes the first one's gradient, over and over",
    ),
    Mutant(
        "sink-gradient-sign", ATTENTION, "if (s != -infinity()) sum -=", "if (s != -infinity()) sum +=",
        "attention-bwd-f16-64-sinks", WRONG, "a sink's gradient points the other way",
    ),
    # ---- waits and copies: of no account where copies go through registers
    Mutant(
        "gemm-wait-off-by-one", GEMM, "copies_wait<AHEAD - 1>", "copies_wait<AHEAD>", "gemm-f16-nt", NAN,
        "a slice is multiplied while it is on its way", archs=DIRECT,
    ),
    Mutant(
        "gemm-wait-missing", GEMM, "copies_wait<AHEAD - 1>();", "", "gemm-f16-nt", NAN, "no slice is waited for",
        archs=DIRECT,
    ),
    Mutant(
        "attention-wait-off-by-one", ATTENTION, "copies_wait<AHEAD - 1>(); if (STAGES == 1) block_barrier(); // everyone",
        "copies_wait<AHEAD>(); if (STAGES == 1) block_barrier(); // everyone", "attention-f16-64", NAN,
        "a tile of keys is multiplied while it is on its way", archs=DIRECT,
    ),
    Mutant(
        "attention-queries-not-waited-for", ATTENTION, "copies_wait<AHEAD>();", "", "attention-bf16-128", UNTOUCHED,
        "queries are loaded into registers while they are on their way", archs=DIRECT,
    ),
    Mutant(
        "attention-values-not-landed", ATTENTION, "copy_v.land(tile_v(stage)); block_barrier(); // this",
        "block_barrier(); // this", "attention-f16-64", NAN,
        "values stay in the registers that they are copied through", archs=REGISTERS,
    ),
    Mutant(
        "platform-wait-off-by-one", HOST, "host::finish_copies(PENDING)", "host::finish_copies(PENDING + 1)",
        "gemm-f16-nt", NAN, "the platform's wait leaves one group too many in flight", archs=DIRECT,
    ),
    Mutant(
        "platform-copy-does-not-fill", WARPS, "store_16(x.to, 0, 0);", "", "gemm-f16-nt", NAN,
        "the platform's copy leaves what lay in a tile beyond the ends", archs=DIRECT,
    ),
)

BACKWARD = "attention-bwd-f16-64-causal-mqa-5"
REFILL = "block_barrier(); // this slice is visible to all, and the stage refilled below is no longer read"

WRONG_ORDER = (
    # ---- a barrier missing
    Mutant(
        "gemm-slice-not-visible", GEMM, "block_barrier(); // this slice", "// this slice", "gemm-f16-nt", RACE,
        "a slice is multiplied before all threads have copied their part", "thread",
    ),
    Mutant(
        "gemm-one-stage-overwritten", GEMM, "if (STAGES == 1) block_barrier();", "", "gemm-f16-nt", RACE,
        "a slice lands where another is still multiplied", "thread", REGISTERS,
    ),
    Mutant(
        "gemm-result-not-visible-to-the-warp", GEMM, "E::to_shared(out, acc); warp_barrier();",
        "E::to_shared(out, acc);", "gemm-f16-nt", RACE, "a result is read before all lanes have written theirs",
        "thread",
    ),
    Mutant(
        "gemm-last-result-overwritten", GEMM, "if (KS_PERSISTENT) warp_barrier();", "if (KS_PERSISTENT) {}",
        "gemm-f32-nn-k-0-beta-half", RACE, "a result overwrites the one before, which is still read", "thread",
    ),
    Mutant(
        "gemm-ring-overwritten-by-the-result", GEMM, "else block_barrier(); // the ring", "else {} // the ring",
        "gemm-f16-nt", RACE, "a result overwrites slices that are still multiplied", "thread", REGISTERS,
    ),
    Mutant(
        "attention-tile-not-visible", ATTENTION, "block_barrier(); // this tile", "// this tile",
        "attention-f16-64-causal-65x65", RACE, "keys are multiplied before all threads have copied their part",
        "thread",
    ),
    Mutant(
        "attention-queries-not-visible", ATTENTION, "copies_wait<AHEAD>(); block_barrier();", "copies_wait<AHEAD>();",
        "attention-bf16-128-causal-nan-in-hidden-v", RACE,
        "queries are loaded before all threads have copied their part", "thread",
    ),
    Mutant(
        "attention-queries-overwritten", ATTENTION, "block_barrier(); // the queries", "// the queries",
        "attention-f16-192v128", RACE, "the output overwrites queries that another warp still reads", "thread",
    ),
    Mutant(
        "backward-lines-overwritten", ATTENTION, "lines + parity * 2 * STEP", "lines", BACKWARD, RACE,
        "the LSEs of a tile overwrite the last one's, which others still read", "thread",
    ),
    Mutant(
        "backward-owned-overwritten", ATTENTION, "block_barrier(); E::map(gradient_k,", "E::map(gradient_k,",
        "attention-bwd-bf16-192v256-causal", RACE, "results overwrite keys that another warp still reads", "thread",
    ),
    Mutant(
        "backward-results-overlap", ATTENTION, "memory + warp_index() * STAGED_BYTES",
        "memory + warp_index() * (STAGED_BYTES / 2)", BACKWARD, RACE, "two warps' results lie in each other's way",
        "thread",
    ),
    Mutant(
        "backward-second-result-too-early", ATTENTION, "row0, rows, column0, columns); warp_barrier();",
        "row0, rows, column0, columns);", BACKWARD, RACE, "dv overwrites dk, which other lanes still write out", "thread",
    ),
    Mutant(
        "simt-probabilities-not-visible", SIMT, "to_shared(t, a); warp_barrier();", "to_shared(t, a);",
        "attention-f32-64-causal", RACE, "weights are multiplied before all lanes have written theirs", "thread",
    ),
    Mutant(
        "platform-barrier-of-the-warp-alone", HOST, "void block_barrier() { host::any_of_block(false); }",
        "void block_barrier() { host::meet(host::self(), host::AT_WARP_BARRIER); }", "gemm-f16-nt", RACE,
        "the platform's block barrier holds up the warp alone", "thread",
    ),
    # ---- too early a copy
    Mutant(
        "gemm-refilled-while-read", GEMM, f"{REFILL} fetch();", f"fetch();\n{REFILL}\n", "gemm-f16-nt", RACE,
        "a copy starts into a stage that others still multiply", "thread", DIRECT,
    ),
    # ---- a row too many
    Mutant(
        "gemm-row-read", GEMM, "A, m0, M, k0, K)", "A, m0, M + 1, k0, K)", "gemm-f16-nt", BEYOND, "row M of A is read",
        "address",
    ),
    Mutant(
        "gemm-row-written", GEMM, "row0, M, col0, N);", "row0, M + 1, col0, N);", "gemm-f16-nt", BEYOND,
        "row M of C is written", "address",
    ),
    Mutant(
        "attention-key-read", ATTENTION, "tile * BN, own.S_k, 0, KS_DQK", "tile * BN, own.S_k + 1, 0, KS_DQK",
        "attention-f16-64-causal-65x65", BEYOND, "key S_k is read", "address",
    ),
    Mutant(
        "attention-lse-written", ATTENTION, "if (row < rows) {", "if (row <= rows) {",
        "attention-f16-64-causal-65x65", BEYOND, "the LSE of row S_q is written", "address",
    ),
    Mutant(
        "attention-table-read", BASE, "i = min_of(i, last);", "", "attention-f16-64-pages-1-full", BEYOND,
        "pages of keys beyond the last are looked up", "address",
    ),
    Mutant(
        "gemm-result-beyond-shared-memory", GEMM, "RESULT + warp_index() * TileC",
        "RESULT + (warp_index() + 1) * TileC", "gemm-f16-nt", BEYOND, "results lie one warp's too far", "address",
        DIRECT,
    ),
    # ---- ways that part
    Mutant(
        "gemm-a-lane-leaves", GEMM, "E::to_shared(out, acc);", "if (lane() == 3) return;\nE::to_shared(out, acc);",
        "gemm-f16-nt", r"block 0, warp [0-3]: lanes wait at a warp barrier and the end",
        "a lane does not come to a barrier",
    ),
    Mutant(
        "gemm-a-warp-leaves", GEMM, "no longer read fetch();",
        "no longer read\nif (warp_index() == 1) return;\nfetch();", "gemm-f16-nt",
        r"block 0, warp [0-3]: warps wait at a block barrier and the end", "a warp does not come to a barrier",
    ),
)

MUTANTS = (*WRONG_NUMBERS, *WRONG_ORDER)
