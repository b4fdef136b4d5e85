"""Bugs planted in what the GEMM does beyond a product: sums, what is added, row sums, segments,
heads, teams."""

from __future__ import annotations

from mutant import DIRECT, GEMM, NAN, NOT_EXACT, RACE, STRAY, UNTOUCHED, WRONG, Mutant

HALVES = "qkv-projection-f16-rotary-halves"

PRODUCTS = (
    # ---- sums of several products
    Mutant(
        "gemm-next-term-lost",
        GEMM,
        "if (++next_term == terms)",
        "if (++next_term >= 1)",
        "gemm-f16-nt-sum-batch",
        WRONG,
        "after the first product the next tile's are summed",
    ),
    # ---- how float32 is multiplied
    Mutant(
        "gemm-rounded-where-split",
        GEMM,
        "<KS_PRECISION>",
        "<1>",
        "gemm-f32-nn-tf32x3",
        WRONG,
        "numbers are rounded to TF32 where they should be split",
    ),
    # ---- what is added
    Mutant(
        "gemm-bias-of-the-first-tile",
        GEMM,
        "ends.bias[col0 + j]",
        "ends.bias[j]",
        "gemm-f16-nt-bias",
        WRONG,
        "every tile takes the first one's bias",
    ),
    Mutant(
        "gemm-residual-by-c-s-rows",
        GEMM,
        "from{ends.residual, residual_row}",
        "from{ends.residual, c_row}",
        "gemm-f16-nt-bias-residual-same-rows",
        NAN,
        "rows of the residual are taken C's stride apart",
    ),
    # ---- scales of blocks
    Mutant(
        "gemm-scales-of-the-first-block",
        GEMM,
        "of_rows + (i64)block * scales.a.k",
        "of_rows",
        "gemm-e4m3fn-nt-blocks-1x128x128",
        WRONG,
        "every block along K takes the first one's scale of A",
        archs=("host",),
    ),
    Mutant(
        "gemm-block-not-started-anew",
        GEMM,
        "}); E::zero(part); };",
        "}); };",
        "gemm-e4m3fn-nt-blocks-1x128x128",
        WRONG,
        "a block's sum is counted again with the next",
        archs=("host",),
    ),
    Mutant(
        "gemm-last-block-missed",
        GEMM,
        "(k_end % KS_SCALE_K == 0 || slice + 1 == slices)",
        "k_end % KS_SCALE_K == 0",
        "gemm-e4m3fn-nt-blocks-1x128x128",
        WRONG,
        "a last block that is shorter is not added",
        archs=("host",),
    ),
    # ---- sums of rows
    Mutant(
        "gemm-row-sums-one-short",
        GEMM,
        "for (int k = 0; k < BK; k++) row_sums",
        "for (int k = 1; k < BK; k++) row_sums",
        "output-projection-bwd-f16-integers",
        NOT_EXACT,
        "the first summand of every slice is lost",
    ),
    # ---- segments
    Mutant(
        "gemm-segment-off-by-one",
        GEMM,
        "(head >= segments.of[2].first)",
        "(head > segments.of[2].first)",
        "qkv-projection-bwd-f16",
        r"",
        "the first head of v is looked for behind k's last",
    ),
    # ---- heads
    Mutant(
        "heads-turned-backwards",
        GEMM,
        "x = old * cosine - y * sine;",
        "x = old * cosine + y * sine;",
        HALVES,
        WRONG,
        "elements are turned the wrong way",
    ),
    Mutant(
        "heads-order-kept",
        GEMM,
        "apart ? from.v[2 * e % V] : x",
        "x",
        HALVES,
        WRONG,
        "the order of the weight's rows is not undone",
    ),
    Mutant(
        "heads-first-position-ignored",
        GEMM,
        "first_position + index",
        "index",
        "qkv-projection-f16-rotary-pairs-from-17",
        WRONG,
        "tokens are counted from 0",
    ),
    Mutant(
        "heads-row-too-many",
        GEMM,
        "if (row0 + r >= row_end || col0 + g < begin",
        "if (row0 + r > row_end || col0 + g < begin",
        "qkv-projection-f16-gaps",
        STRAY,
        "a token beyond the last is written",
    ),
    # ---- teams
    Mutant(
        "gemm-teams-share-a-ring",
        GEMM,
        ") + team * TEAM_BYTES",
        ")",
        "gemm-f16-nt-35-of-16x16x16",
        RACE,
        "all teams copy to one place",
        "thread",
    ),
    Mutant(
        "gemm-team-slice-not-visible",
        GEMM,
        "if (TEAMS > 1) warp_barrier();",
        "if (TEAMS > 1) {}",
        "gemm-f16-nt-35-of-16x16x16",
        RACE,
        "a slice is multiplied before all lanes have copied their part",
        "thread",
    ),
    Mutant(
        "gemm-team-skips-tiles",
        GEMM,
        "const unsigned stride = blocks * TEAMS;",
        "const unsigned stride = blocks * TEAMS + (TEAMS > 1);",
        "gemm-f16-nt-4096-of-8x8x8",
        f"{UNTOUCHED}|{NAN}",
        "a block's next tiles lie too far on",
        archs=DIRECT,
    ),
)
