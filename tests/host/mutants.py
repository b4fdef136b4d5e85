"""Bugs planted in the device sources, and the parity case that kills each: what the tests are worth.

Every row is bound to a few words of a source. Where that source is changed so that the words are gone, the row has to
be changed too, such that it plants the same bug in what stands there now; never deleted because it no longer fits.
"""

from __future__ import annotations

from attention_mutants import ATTENTIONS
from mutant import (
    ATTENTION,
    BASE,
    BEYOND,
    DIRECT,
    GEMM,
    HOST,
    NAN,
    NOT_EXACT,
    RACE,
    REGISTERS,
    SIMT,
    STRAY,
    UNTOUCHED,
    WARPS,
    WRONG,
    Mutant,
)
from product_mutants import PRODUCTS
from unfused_mutants import UNFUSED_ATTENTIONS

STAGE = "if (STAGES == 1) block_barrier(); // everyone"

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
        "gemm-half-sums", HOST, "add(acc.x[r][c], a.x[r][k + e], x[e]);",
        "acc.x[r][c] = to_sum(convert<T>(acc.x[r][c] + a.x[r][k + e] * x[e]));", "gemm-f16-nt-to-f32", WRONG,
        "sums are kept in half precision",
    ),
    Mutant(
        "gemm-cut-off", HOST, "magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)", "magnitude - 0x38000000u",
        "gemm-f16-nt-integers-rounded", NOT_EXACT, "results are cut off, not rounded",
    ),
    Mutant(
        "simt-last-chunk-dropped", SIMT, "for (int k = 0; k < K; k += KV) {\n      Chunk<T> left",
        "for (int k = 0; k < K - KV; k += KV) {\n      Chunk<T> left",
        "gemm-f32-nn-integers", NOT_EXACT, "the last summands of every step are lost",
    ),
    # ---- GEMM: what meets what, and where it lies
    Mutant(
        "gemm-stride-of-the-wrong-operand", GEMM, "B{nullptr, b_row}", "B{nullptr, a_row}", "gemm-f32-nn", WRONG,
        "rows of B are taken A's stride apart",
    ),
    Mutant(
        "gemm-batch-stride-ignored", GEMM, "batch * by_batch +", "", "gemm-f16-nt", UNTOUCHED,
        "every batch is the first",
    ),
    Mutant(
        "gemm-wrong-b-head", GEMM, "head / b_head_group", "head % b_head_group", "gemm-f16-nt-b-group-2", WRONG,
        "heads that share a B take another's",
    ),
    Mutant(
        "gemm-wrong-address-of-a-list", GEMM, "(i64)batch * heads + head", "(i64)batch + head",
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
        "gemm-column-too-many", GEMM, "C, row0, M, col0, N);", "C, row0, M, col0, N + 1);", "gemm-f16-nt-gaps", STRAY,
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
    # ---- attention
    *ATTENTIONS,
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
        "attention-wait-off-by-one", ATTENTION, f"copies_wait<AHEAD - 1>(); {STAGE}", f"copies_wait<AHEAD>(); {STAGE}",
        "attention-f16-64", NAN, "a tile of keys is multiplied while it is on its way", archs=DIRECT,
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
REFILL = "team_barrier(); // this slice is visible to all, and the stage refilled below is no longer read"

WRONG_ORDER = (
    # ---- a barrier missing
    Mutant(
        "gemm-slice-not-visible", GEMM, "team_barrier(); // this slice", "// this slice", "gemm-f16-nt", RACE,
        "a slice is multiplied before all threads have copied their part", "thread",
    ),
    Mutant(
        "gemm-one-stage-overwritten", GEMM, "if (STAGES == 1) team_barrier();", "", "gemm-f16-nt", RACE,
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
        "gemm-ring-overwritten-by-the-result", GEMM, "else team_barrier(); // the ring", "else {} // the ring",
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
        "backward-scores-not-handed-on", ATTENTION, "block_barrier(); add_scores(gradient_v, s,",
        "add_scores(gradient_v, s,", "attention-bwd-f16-64-causal-any-order", RACE,
        "p and ds of other warps are multiplied before they are there", "thread",
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
        "row0, rows, column0, columns);", BACKWARD, RACE, "dv overwrites dk, which other lanes still write out",
        "thread",
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
        "gemm-row-written", GEMM, "C, row0, M, col0, N);", "C, row0, M + 1, col0, N);", "gemm-f16-nt", BEYOND,
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
        "gemm-result-beyond-shared-memory", GEMM, "RESULT + warp * TileC",
        "RESULT + (warp + 1) * TileC", "gemm-f16-nt", BEYOND, "results lie one warp's too far", "address",
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

MUTANTS = (*WRONG_NUMBERS, *WRONG_ORDER, *PRODUCTS, *UNFUSED_ATTENTIONS)
