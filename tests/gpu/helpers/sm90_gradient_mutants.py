"""Bugs planted in Hopper's gradients of an attention, of the kinds of sm90_mutants.py, and of their
own: turns, and stages of two rings that one state counts."""

from __future__ import annotations

from mutant import Mutant

FOLDER = "sm90/attention/backward/"
PRODUCER, CONSUMER, TURNS, TILES, FRAGMENTS, SUMS, ROWS, DQ = (
    f"{FOLDER}{name}.h"
    for name in (
        "producer",
        "consumer",
        "turns",
        "tiles",
        "fragments",
        "sums",
        "row_values",
        "query_gradient",
    )
)
MANY, CAUSAL = "attention-bwd-f16-64-many-tiles", "attention-bwd-bf16-128-causal-many-tiles"
SEQUENCES = "attention-bwd-f16-64-causal-many-tiles-sequences"
MARGIN = "attention-bwd-f16-64-causal-sequences-margin-gqa"
FEW_KEYS = "attention-bwd-bf16-128-causal-many-tiles-few-keys"
NARROW, GROUPED = "attention-bwd-bf16-96-many-tiles", "attention-bwd-bf16-128-causal-many-tiles-gqa"
MAIN = "sm90/attention/backward.h"
WIDE_FOLDER = FOLDER + "wide/"
WIDE_PRODUCER, WIDE_CONSUMER = (f"{WIDE_FOLDER}{name}.h" for name in ("producer", "consumer"))
WIDE = "attention-bwd-bf16-256-many-tiles"
HANDED = "warp_barrier();\n        if (lane == 0) barrier_arrive(rings.ds.full"


def _mutant(
    name: str, place: str, find: str, plant: str, case: str, what: str, said: str = ""
) -> Mutant:
    return Mutant(f"gradients-{name}", place, find, plant, case, said, what, implementation="sm90")


MUTANTS = (
    _mutant(
        "ds-phase",
        CONSUMER,
        "PipelineState<DS_STAGES> ds_out{0, 1};",
        "PipelineState<DS_STAGES> ds_out{0, 0};",
        MANY,
        "ds waits for the end of a phase before anyone was in it",
    ),
    _mutant(
        "queries-phase",
        PRODUCER,
        "PipelineState<STAGES> q{0, 1};",
        "PipelineState<STAGES> q{0, 0};",
        MANY,
        "the same of the queries' loads",
    ),
    _mutant(
        "ds-not-waited",
        CONSUMER,
        "if (!first) rings.ds.wait_full(ds_out);",
        "",
        CAUSAL,
        "dq is of what the other consumer has not written",
    ),
    _mutant(
        "ds-written-early",
        CONSUMER,
        "else rings.ds.wait_empty(ds_out);",
        "",
        CAUSAL,
        "ds is written while the other consumer reads that of two steps before",
    ),
    _mutant(
        "ds-of-the-last-step",
        CONSUMER,
        "ds_in.advance();",
        "",
        MANY,
        "a tile's last dq is of the step before",
    ),
    _mutant(
        "first-dq-added",
        CONSUMER,
        "first = false;\n          return;",
        "first = false;",
        MANY,
        "what the first step multiplies is added",
    ),
    _mutant(
        "queries-released-twice",
        CONSUMER,
        "if (!first) release_q();",
        "release_q();",
        MANY,
        "a stage is handed back before anyone has read it",
    ),
    _mutant(
        "queries-of-another-stage",
        CONSUMER,
        "q.stage == 0 ? STAGES - 1 : q.stage - 1",
        "q.stage",
        MANY,
        "the stage in use is handed back for the one before",
    ),
    _mutant(
        "turns-not-waited",
        TURNS,
        "while (done != before) done = load_relaxed(counter);",
        "",
        CAUSAL,
        "sums are in anyone's order",
    ),
    _mutant(
        "turn-not-awaited",
        FRAGMENTS,
        "if (KS_IN_ORDER) barrier_wait(turns.of(group).full({0, 0}), parity);",
        "",
        CAUSAL,
        "a consumer adds before its turn, which its thread still takes",
    ),
    _mutant(
        "turn-of-another-step",
        FRAGMENTS,
        "turns.of(group).full({0, 0}), parity)",
        "turns.of(group).full({0, 0}), parity ^ 1)",
        CAUSAL,
        "a consumer takes the turn of the step before for its own",
    ),
    _mutant(
        "turn-skipped",
        TURNS,
        "add_release(own, 1);",
        "if (left > 1) add_release(own, 1);",
        CAUSAL,
        "the next tile waits for ever for the last block of queries",
    ),
    _mutant(
        "counter-raised-early",
        TURNS,
        "barrier_wait(turn.empty({0, 0}), parity);",
        "",
        CAUSAL,
        "the next tile adds while this one does",
    ),
    _mutant(
        "sums-read-early",
        DQ,
        "  earlier_kernels_wait();\n",
        "",
        CAUSAL,
        "dq is made of sums to which tiles still add",
    ),
    _mutant(
        "row-values-read-early",
        MAIN,
        "    earlier_kernels_wait();",
        "   ",
        CAUSAL,
        "the first tiles read row values that are not written yet",
    ),
    _mutant(
        "counter-of-the-next-head",
        TURNS,
        "counter += (count.blocks.head_blocks - (w.stop - m)) * PIECES;",
        "counter += count.blocks.head_blocks * PIECES;",
        GROUPED,
        "turns of a group's second head are taken where the first's blocks end",
    ),
    _mutant(
        "order-backwards",
        TILES,
        "return w.way() < 0 ? w.tile :",
        "return w.way() < 0 ? 0 :",
        CAUSAL,
        "tiles of the last section wait for nobody, and then for ever",
    ),
    _mutant(
        "first-adds",
        TURNS,
        "first = before == 0;",
        "first = false;",
        CAUSAL,
        "sums begin with what was in memory",
    ),
    _mutant(
        "unseen-not-zeroed",
        ROWS,
        "if (!KS_IN_ORDER || Band{left, right}.unseen(tile / PARTS, s.S_k - s.S_q, s.S_k)) {",
        "if (!KS_IN_ORDER) {",
        FEW_KEYS,
        "dq of queries that see no key is what was in memory",
    ),
    _mutant(
        "keys-released-early",
        CONSUMER,
        "wgmma_wait<0>();\n        if (lane == 0) barrier_arrive(rings.k.empty(kv));",
        "if (lane == 0) barrier_arrive(rings.k.empty(kv));\n        wgmma_wait<0>();",
        CAUSAL,
        "the next tile's keys come while the last dq reads these",
    ),
    _mutant(
        "values-not-waited",
        CONSUMER,
        "if (first) rings.v.wait_full(kv);",
        "",
        CAUSAL,
        "dp is of values that are on their way",
    ),
    _mutant(
        "way-of-the-producer",
        PRODUCER,
        "if ((m += w.way()) == w.stop) {",
        "if (++m == w.stop) {",
        CAUSAL,
        "queries are loaded forwards where the consumers walk backwards",
    ),
    _mutant(
        "turns-not-zeroed",
        ROWS,
        "if (KS_IN_ORDER && row0 == 0",
        "if (KS_IN_ORDER && row0 == 64",
        CAUSAL,
        "the second launch waits for the turns of the first",
    ),
    _mutant(
        "counter-not-reset",
        PRODUCER,
        "a.counter[0] = 0, a.counter[1] = 0;",
        "a.counter[1] = 0;",
        CAUSAL,
        "the second launch begins where the first ended",
    ),
    _mutant(
        "slot-of-a-tile",
        TILES,
        "return kv.stage + KV_STAGES * kv.parity;",
        "return kv.stage;",
        CAUSAL,
        "a tile is written while consumers read the one before",
    ),
    _mutant(
        "queries-of-the-next-sequence",
        CONSUMER,
        "zero<STEP, V_COLUMNS>(storage.dout[o().stage], w.S_q - m * STEP);",
        "{}",
        MARGIN,
        "NaN behind a sequence's queries come into its dv",
    ),
    _mutant(
        "last-rows-not-swizzled",
        FRAGMENTS,
        "(panel + i / chunks * 128 + (i % chunks ^ i / chunks % 8) * 16);",
        "(panel + i / chunks * 128 + i % chunks * 16);",
        SEQUENCES,
        "a sequence's last keys are taken as if they were not",
    ),
    _mutant(
        "depth-of-ds",
        CONSUMER,
        "DS_BYTES, 4 * 2048, 2048, 2048, 1, 1>",
        "DS_BYTES, 4 * 2048, 1024, 2048, 1, 1>",
        MANY,
        "16 keys on in ds are 8",
    ),
    _mutant(
        "piece-of-dq",
        DQ,
        "from[c / 8 * (PIECE / 4) + ",
        "from[",
        CAUSAL,
        "columns from 64 on are the first again",
    ),
    _mutant(
        "room-of-a-sequence",
        SUMS,
        "q_first / STEP + batch :",
        "q_first / STEP :",
        SEQUENCES,
        "sequences share blocks of sums",
    ),
    _mutant(
        "warps-of-a-narrow-piece",
        DQ,
        "warp * (4 * piece_columns(c / 8))",
        "warp * 256",
        NARROW,
        "a piece of 32 columns is read as one of 64",
    ),
    _mutant(
        "columns-of-the-second-consumer",
        MAIN,
        "else consumer.run<SECOND>();",
        "else consumer.run<64>();",
        NARROW,
        "32 columns are added behind a block of sums",
    ),
    # ---- head dims that do not fill what is multiplied
    _mutant(
        "last-columns-not-multiplied",
        CONSUMER,
        "multiply_ss<T, STEP, QK_COLUMNS / 16,",
        "multiply_ss<T, STEP, DQK / 16,",
        "attention-bwd-f16-72",
        "scores without a head's last eight columns",
    ),
    _mutant(
        "gradient-of-the-next-head",
        DQ,
        "column < DQK)",
        "column < QK_COLUMNS)",
        "attention-bwd-f16-72-gaps",
        "zeros behind a head's dq",
    ),
    _mutant(
        "delta-of-the-next-head",
        ROWS,
        "column < DV)",
        "column < V_COLUMNS)",
        "attention-bwd-f16-72-gaps",
        "NaN behind a head comes into delta",
    ),
    _mutant(
        "last-rows-of-the-next-head",
        FRAGMENTS,
        "const int chunks = min_of(DIM - c, 64) / 8;",
        "const int chunks = min_of(COLUMNS - c, 64) / 8;",
        "attention-bwd-bf16-72-causal-sequences",
        "a sequence's last rows of dk and dv end in the next head's",
    ),
    _mutant(
        "short-pieces-apart",
        SUMS,
        "PIECE = 64 * (QK_COLUMNS < 64 ? QK_COLUMNS : 64);",
        "PIECE = 64 * 64;",
        "attention-bwd-f16-40-causal-gaps",
        "the second piece of a block of narrow sums lies in the next block",
    ),
    # ---- wide heads: what two consumers and two blocks hand to each other
    _mutant(
        "wide-p-not-waited",
        WIDE_CONSUMER,
        "barrier_wait(rings.p.full(ds_out), ds_out.parity ^ 1);",
        "",
        WIDE,
        "ds is of what the other consumer has not written",
    ),
    _mutant(
        "wide-ds-stays",
        WIDE_CONSUMER,
        "WARP_DS_BYTES, full, rank ^ 1);",
        "WARP_DS_BYTES, full, rank);",
        WIDE,
        "a block sends ds to itself",
    ),
    _mutant(
        "wide-panel",
        WIDE_CONSUMER,
        "return rank * GROUPS + group;",
        "return group;",
        WIDE,
        "both blocks make the same columns of dq",
    ),
    _mutant(
        "wide-keys-of-one",
        WIDE_PRODUCER,
        "first + (rank() ^ 1) * BLOCK_KEYS",
        "first + rank() * BLOCK_KEYS",
        WIDE,
        "the other block's ds meets this one's keys",
    ),
    _mutant(
        "wide-second-half",
        WIDE_CONSUMER,
        "advanced(own, 2 * H * KEY_PANEL_BYTES)",
        "own",
        WIDE,
        "the queries' second half meets the keys' first",
    ),
    # ---- fences
    _mutant(
        "wide-handing-fence",
        WIDE_CONSUMER,
        "async_proxy_fence();\n        warp_barrier();\n        if (lane == 0) {",
        "warp_barrier();\n        if (lane == 0) {",
        WIDE,
        "ds is handed on before wgmma and the copy may read it",
        "order",
    ),
    _mutant(
        "handing-fence",
        CONSUMER,
        f"async_proxy_fence();\n        {HANDED}",
        HANDED,
        MANY,
        "ds is handed on before wgmma may read it",
        "order",
    ),
    _mutant(
        "store-fence",
        FRAGMENTS,
        "async_proxy_fence();\n    warp_barrier();\n    if (KS_KV_VIEW",
        "warp_barrier();\n    if (KS_KV_VIEW",
        MANY,
        "TMA may store what was in shared memory before",
        "order",
    ),
    _mutant(
        "products-fence",
        CONSUMER,
        "wgmma_fence();\n        const u64 o_here",
        "const u64 o_here",
        MANY,
        "registers that dp's products use may not be written yet",
        "order",
    ),
    _mutant(
        "stores-not-waited",
        CONSUMER,
        "if (lane == 0) tma_store_wait<0>();\n}",
        "}",
        MANY,
        "a block ends with stores on their way out of its shared memory",
        "order",
    ),
)

SAID = {
    "gradients-handing-fence": "no proxy fence between fragments and the arrival that hands them "
    "over",
    "gradients-wide-handing-fence": "no proxy fence between fragments and the arrival that hands "
    "them over",
    "gradients-store-fence": "no proxy fence between stores to shared memory and TMA's reading of "
    "it",
    "gradients-products-fence": "no fence between registers written and the products that use them",
    "gradients-stores-not-waited": "a block ends with stores on their way",
}
"""What the rules of tests/crosscompile/test_order.py say of each."""
LUCK = {
    "gradients-ds-written-early": "the other consumer is seldom two steps behind",
    "gradients-keys-released-early": "the next tile's keys come later than the product ends",
    "gradients-turns-not-waited": "tiles mostly come in order",
    "gradients-turn-not-awaited": "the same",
    "gradients-turn-of-another-step": "the same",
    "gradients-slot-of-a-tile": "consumers have mostly read a tile long before",
}
