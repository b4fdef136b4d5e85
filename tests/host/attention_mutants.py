"""Bugs planted in what an attention and its gradients compute, as in mutants.py."""

from __future__ import annotations

from mutant import ATTENTION, BASE, BEYOND, FINITE, INFINITE, NAN, SIMT, UNTOUCHED, WRONG, Mutant

ANY_ORDER = "attention-bwd-f16-64-causal-any-order"
SHORT_PLANE = "attention-bwd-f16-64-sequences-of-q-bias"
HANDED_ON = "E::to_shared(ds_tile.last(), dp, score_row, score_column);"

ATTENTIONS = (
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
        "attention-causal-top-left", ATTENTION, "return S_k - S_q;", "return 0;", "attention-f16-64-causal-7x129",
        WRONG, "the mask is aligned at the top left",
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
        "attention-mask-transposed", ATTENTION, "mask_head, mask_head, (int)mask_row, (int)mask_column",
        "mask_head, mask_head, (int)mask_column, (int)mask_row", "attention-f16-64-mask-odd-transposed", WRONG,
        "a mask's rows are taken for its columns",
    ),
    Mutant(
        "attention-lengths-ignored", ATTENTION, "s.S_k = min_of(lengths[batch], s.S_k);", "",
        "attention-f16-64-lengths", NAN, "keys beyond an entry's length are seen",
    ),
    # ---- attention: what it reads
    Mutant(
        "attention-wrong-kv-head", ATTENTION, "kv_head = KS_GROUPED ? head : head / head_group",
        "kv_head = KS_GROUPED ? head : head % (num_heads / head_group)", "attention-f16-64-causal-batch-invariant",
        WRONG, "a group of query heads takes another's keys",
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
        "inside(j, S_k)))); if (KS_SOFTCAP) x = cap * tanh_fast(x / cap); return x;", "attention-f16-64-everything",
        WRONG, "the cap is applied to what a bias has changed",
    ),
    Mutant(
        "attention-product-asked-whether-finite", ATTENTION,
        "finite(x) ? (y < -LARGEST ? -LARGEST : y > LARGEST ? LARGEST : y) : y",
        "finite(y) || !finite(x) ? y : x < 0 ? -LARGEST : LARGEST", "attention-f16-64-bias", WRONG,
        "y − y is fused with the product y, and what y was rounded by is taken for a sign of infinity", "contracted",
    ),
    Mutant(
        "attention-negative-prefix", "attention/forward.h", "min_of(max_of(prefixes[batch], 0), own.S_k)",
        "min_of(max_of(prefixes[batch], -prefixes[batch]), own.S_k)", "attention-f16-64-prefix-negative", WRONG,
        "a negative prefix is taken for a positive one",
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
        "backward-dots-missed", ATTENTION, "p * (x - mine[STEP + c])", "p * x", "attention-bwd-f16-64", WRONG,
        "of what reaches a score its row's mean is not taken off",
    ),
    Mutant(
        "backward-slope-missed", ATTENTION,
        "if constexpr (KS_SOFTCAP) E::map2(dp, slope, [](int, int, float x, float y) { return x * y; }); "
        f"if constexpr (HANDED) {{ {HANDED_ON} block_barrier(); }}", "", "attention-bwd-f16-64-softcap-5", WRONG,
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
        "backward-keys-beyond-the-length", ATTENTION, "(HIDES || KS_LENGTHS || ATOMIC) &&", "(HIDES || ATOMIC) &&",
        "attention-bwd-f16-64-lengths", WRONG, "keys beyond an entry's length have gradients",
    ),
    Mutant(
        "backward-empty-rows-of-keys", ATTENTION, "there ? lse_base2(lse[h * lse_head + i0 + t]) : infinity()",
        "there ? LOG2_E * lse[h * lse_head + i0 + t] : infinity()", "attention-bwd-f16-64-any-order-bias-voids", NAN,
        "−∞ is subtracted from −∞ where a bias leaves a query no key, and keys take what comes of it",
    ),
    Mutant(
        "backward-empty-rows-of-queries", ATTENTION, "return lse_base2(lse[head * lse_head + mine + r]);",
        "return LOG2_E * lse[head * lse_head + mine + r];", "attention-bwd-f16-64-bias-voids", NAN,
        "−∞ is subtracted from −∞ where a bias leaves a query no key, and its gradient is what comes of it",
    ),
    Mutant(
        "backward-negative-prefix", ATTENTION, "min_of(max_of(prefixes[batch], 0), S_k_seen)",
        "min_of(max_of(prefixes[batch], -prefixes[batch]), S_k_seen)", "attention-bwd-f16-64-prefix-negative", WRONG,
        "a negative prefix is taken for a positive one",
    ),
    Mutant(
        "row-dots-columns-lost", ATTENTION, "d < KS_DV; d += WARP", "d < KS_DV; d += 2 * WARP", "attention-bwd-f16-64",
        WRONG, "half of a row's columns are left out of its sum",
    ),
    Mutant(
        "sum-axis-missed", ATTENTION, "from[j0 * x0 + j1 * x1 + j2 * x2 +", "from[j0 * x0 + j1 * x1 +",
        "attention-bwd-f16-64-bias-by-key", WRONG, "a bias of all queries takes the first one's gradient",
    ),
    Mutant(
        "sink-gradient-sign", ATTENTION, "if (s != -infinity()) sum -=", "if (s != -infinity()) sum +=",
        "attention-bwd-f16-64-sinks", WRONG, "a sink's gradient points the other way",
    ),
    Mutant(
        "warp-index-of-one-lane", ATTENTION, "if (lane() == 0) shares[warp] = sum;",
        "if (lane() == 0) shares[warp_index()] = sum;", "attention-bwd-f16-64-sinks",
        r"block 0, warp [0-3]: lanes wait at warp_index\(\) and a block barrier",
        "one lane asks what all must ask together",
    ),
    Mutant(
        "backward-plane-beyond-the-queries", ATTENTION, "!SHORT_PLANE || i + place.query < own.S_q ? x : 0.f", "x",
        f"{SHORT_PLANE}-nan", NAN, "rows behind a sequence's queries have the gradient of its last bias row",
    ),
    # ---- gradients in any order
    Mutant(
        "sums-not-zeroed", ATTENTION, "i < zero_chunks;", "i < zero_chunks / 2;", ANY_ORDER, NAN,
        "dq is added to what memory holds",
    ),
    Mutant(
        "sums-not-scaled", ATTENTION, "E::map(x, [=](int, int, float y) { return y * scale; });", "", ANY_ORDER, WRONG,
        "dq is what was summed, without the scale",
    ),
    Mutant(
        "sums-of-sequences-overlap", ATTENTION, "IS_PACKED ? q_first / STEP + batch :", "IS_PACKED ? q_first / STEP :",
        "attention-bwd-bf16-128-causal-any-order-sequences-gqa", WRONG, "two sequences add to the same sums",
    ),
    Mutant(
        "sums-of-the-first-head", ATTENTION, "sums + sums_offset(now.tile, h, num_heads)",
        "sums + sums_offset(now.tile, head * head_group, num_heads)",
        "attention-bwd-bf16-128-causal-any-order-sequences-gqa", WRONG, "heads of a group add to the first one's sums",
    ),
    Mutant(
        "sums-of-keys-beyond-the-end", ATTENTION, "(HIDES || KS_LENGTHS || ATOMIC) &&", "(HIDES || KS_LENGTHS) &&",
        "attention-bwd-f16-64-any-order-falling", NAN, "keys that are not there have an infinite weight, times zero",
    ),
    Mutant(
        "backward-bias-of-no-queries", ATTENTION, "SHORT_PLANE && !own.S_q ? 0 : own.S_k", "own.S_k",
        f"{SHORT_PLANE}-any-order", NAN, "a sequence without queries reads a bias row that it does not have",
    ),
    Mutant(
        "sums-beyond-the-queries", ATTENTION, "if (!SHORT_PLANE || i0 < own.S_q) E::atomic_add", "E::atomic_add",
        f"{SHORT_PLANE}-any-order", BEYOND, "steps behind a sequence's queries add to sums that are not its own",
        "address",
    ),
)
