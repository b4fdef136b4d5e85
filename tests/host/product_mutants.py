"""Bugs planted in what the GEMM does beyond a product: sums, what is added, row sums, segments, heads, teams."""

from __future__ import annotations

from mutant import GEMM, NAN, NOT_EXACT, RACE, STRAY, UNTOUCHED, WRONG, Mutant

HALVES = "qkv-projection-f16-rotary-halves"

PRODUCTS = (
    # ---- sums of several products
    Mutant(
        "gemm-next-term-lost", GEMM, "if (++next_term == terms)", "if (++next_term >= 1)", "gemm-f16-nt-sum-batch",
        WRONG, "after the first product the next tile's are summed",
    ),
    Mutant(
        "gemm-groups-mixed-up", GEMM, "next.batch * batch_group + groups", "next.batch + groups",
        "gemm-f16-nt-sum-both", WRONG, "products of another C's batches are summed",
    ),
    Mutant(
        "gemm-head-of-a-group-repeated", GEMM, "next_term - groups * head_group", "0", "gemm-f16-nt-sum-heads", WRONG,
        "the first head of a group is summed again and again",
    ),
    # ---- how float32 is multiplied
    Mutant(
        "gemm-rounded-where-split", GEMM, "Tf32Engine<KS_PRECISION>", "Tf32Engine<1>", "gemm-f32-nn-tf32x3", WRONG,
        "numbers are rounded to TF32 where they should be split",
    ),
    # ---- what is added
    Mutant(
        "gemm-bias-of-the-first-tile", GEMM, "ends.bias[col0 + j]", "ends.bias[j]", "gemm-f16-nt-bias", WRONG,
        "every tile takes the first one's bias",
    ),
    Mutant(
        "gemm-residual-by-c-s-rows", GEMM, "from{ends.residual, residual_row}", "from{ends.residual, c_row}",
        "gemm-f16-nt-bias-residual-same-rows", NAN, "rows of the residual are taken C's stride apart",
    ),
    Mutant(
        "gemm-residual-scaled", GEMM, "x + (Sum)to_sum(from.row", "x + alpha * (Sum)to_sum(from.row",
        "gemm-f16-nt-bias-residual-alpha-beta", WRONG, "the residual is multiplied by alpha",
    ),
    # ---- sums of rows
    Mutant(
        "gemm-row-sums-one-short", GEMM, "for (int k = 0; k < BK; k++) row_sums",
        "for (int k = 1; k < BK; k++) row_sums", "output-projection-bwd-f16-integers", NOT_EXACT,
        "the first summand of every slice is lost",
    ),
    Mutant(
        "gemm-row-sums-of-one-slice", GEMM, "if (RowSums::THERE && sums_of)",
        "if (RowSums::THERE && sums_of && slice < 1)", "qkv-projection-bwd-f16-bias", WRONG,
        "rows of the first slice alone are summed",
    ),
    # ---- segments
    Mutant(
        "gemm-segment-by-all-heads", GEMM, "(head - from.first) * from.head", "head * from.head",
        "qkv-projection-bwd-f16-different-orders", r"", "a segment's heads are counted from the first segment's on",
    ),
    Mutant(
        "gemm-segment-off-by-one", GEMM, "(head >= segments.of[2].first)", "(head > segments.of[2].first)",
        "qkv-projection-bwd-f16", r"", "the first head of v is looked for behind k's last",
    ),
    # ---- heads
    Mutant(
        "heads-turned-backwards", GEMM, "x = old * cosine - y * sine;", "x = old * cosine + y * sine;", HALVES, WRONG,
        "elements are turned the wrong way",
    ),
    Mutant(
        "heads-v-turned", GEMM, "((column - turned_end) & (c - rotary_dim)) >> 31", "(c - rotary_dim) >> 31", HALVES,
        WRONG, "values are turned too",
    ),
    Mutant(
        "heads-order-kept", GEMM, "first.v[e] = apart ? from.v[2 * e % V] : x.v[e];", "first.v[e] = x.v[e];", HALVES,
        WRONG, "the order of the weight's rows is not undone",
    ),
    Mutant(
        "heads-bias-in-the-wrong-order", GEMM, "ends.bias[heads.order.weight_row(col0 + j)]", "ends.bias[col0 + j]",
        HALVES, WRONG, "the bias is not taken in the order of the weight's rows",
    ),
    Mutant(
        "heads-position-of-the-first-entry", GEMM, "positions[(batch + entry) * positions_batch +", "positions[",
        "qkv-projection-f16-rotary-halves-positions", WRONG, "every entry has the first one's positions",
    ),
    Mutant(
        "heads-first-position-ignored", GEMM, "!KS_POSITIONS ? first_position + index", "!KS_POSITIONS ? index",
        "qkv-projection-f16-rotary-pairs-from-17", WRONG, "tokens are counted from 0",
    ),
    Mutant(
        "heads-entry-not-left", GEMM, "return {batch + entry, index, position};", "return {batch, index, position};",
        "qkv-projection-f16", UNTOUCHED, "tokens of all entries go to the first",
    ),
    Mutant(
        "heads-row-too-many", GEMM, "if (row0 + r >= row_end || col0 + g < begin",
        "if (row0 + r > row_end || col0 + g < begin", "qkv-projection-f16-gaps", STRAY,
        "a token beyond the last is written",
    ),
    # ---- teams
    Mutant(
        "gemm-teams-share-a-ring", GEMM, "shared_memory<KS_SHARED_BYTES>() + team * TEAM_BYTES",
        "shared_memory<KS_SHARED_BYTES>()", "gemm-f16-nt-35-of-16x16x16", RACE, "all teams copy to one place", "thread",
    ),
    Mutant(
        "gemm-team-slice-not-visible", GEMM, "if (TEAMS > 1) warp_barrier();", "if (TEAMS > 1) {}",
        "gemm-f16-nt-35-of-16x16x16", RACE, "a slice is multiplied before all lanes have copied their part", "thread",
    ),
    Mutant(
        "gemm-team-skips-tiles", GEMM, "const unsigned stride = blocks * TEAMS;",
        "const unsigned stride = blocks * TEAMS + (TEAMS > 1);", "gemm-f16-nt-4096-of-8x8x8", f"{UNTOUCHED}|{NAN}",
        "a block's next tiles lie too far on",
    ),
)
