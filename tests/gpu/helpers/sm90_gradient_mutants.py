"""Bugs planted in Hopper's gradients of an attention, of the kinds of sm90_mutants.py, and of their
own: semaphores, and stages of two rings that one state counts."""

from __future__ import annotations

from mutant import Mutant

FOLDER = "sm90/attention/backward/"
PRODUCER, CONSUMER, SEMAPHORE, SUMS, ROWS = (
    f"{FOLDER}{name}.h" for name in ("producer", "consumer", "dq_semaphore", "sums", "row_values")
)
DQ, WIDE_CONSUMER = f"{FOLDER}query_gradient.h", f"{FOLDER}wide/consumer.h"
MAIN, SCORES = "sm90/attention/backward.h", "sm90/attention/score_gradient.h"
ELEMENTS, LISTS = f"{FOLDER}elements.h", f"{FOLDER}query_lists.h"
DOCUMENTS = "attention-bwd-f16-64-many-tiles-documents"
PREFIX = "attention-bwd-bf16-128-causal-many-tiles-prefix"
BIAS, MASK = "attention-bwd-bf16-128-many-tiles-bias", "attention-bwd-f16-64-causal-many-tiles-mask"
MANY, CAUSAL = "attention-bwd-f16-64-many-tiles", "attention-bwd-bf16-128-causal-many-tiles"
SEQUENCES = "attention-bwd-f16-64-causal-many-tiles-sequences"
SEQUENCES_BY_ELEMENT = "attention-bwd-bf16-128-many-tiles-sequences-alibi"
MARGIN = "attention-bwd-f16-64-causal-sequences-margin-gqa"
FEW_KEYS, GROUPED = f"{CAUSAL}-few-keys", f"{CAUSAL}-gqa"
WIDE = "attention-bwd-bf16-256-many-tiles"


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
        "ds-not-waited",
        CONSUMER,
        "if (!first) rings.ds.wait_full(ds_out);",
        "",
        CAUSAL,
        "dq is of what the other consumer has not written",
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
        "semaphore-not-waited",
        SEMAPHORE,
        "while (done != before) done = load_relaxed(counter);",
        "",
        CAUSAL,
        "sums are in anyone's order",
    ),
    _mutant(
        "semaphore-not-raised",
        SEMAPHORE,
        "add_release(own, 1);  // releases",
        "if (left > 1) add_release(own, 1);  // releases",
        CAUSAL,
        "the next tile waits for ever for the last block of queries",
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
        SEMAPHORE,
        "(count.blocks.head_blocks - (w.stop - m))",
        "count.blocks.head_blocks",
        GROUPED,
        "semaphores of a group's second head are read where the first's blocks end",
    ),
    _mutant(
        "first-adds",
        SEMAPHORE,
        "first = before == 0;",
        "first = false;",
        CAUSAL,
        "sums begin with what was in memory",
    ),
    _mutant(
        "unseen-not-zeroed",
        ROWS,
        "Config::IN_ORDER || Band{left, right}.unseen(tile / PARTS, s.S_k - s.S_q, s.S_k)",
        "Config::IN_ORDER",
        FEW_KEYS,
        "dq of queries that see no key is what was in memory",
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
        "semaphores-not-zeroed",
        ROWS,
        "row0 == 0",
        "row0 == 64",
        CAUSAL,
        "the second launch waits for the semaphores of the first",
    ),
    _mutant(
        "queries-of-the-next-sequence",
        CONSUMER,
        "zero<STEP, V_COLUMNS>(storage.dout[o().stage], w.S_q - query);",
        "{}",
        MARGIN,
        "NaN behind a sequence's queries come into its dv",
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
        "room-of-a-sequence",
        SUMS,
        "q_first / STEP + batch :",
        "q_first / STEP :",
        SEQUENCES,
        "sequences share blocks of sums",
    ),
    # ---- head dims that do not fill what is multiplied
    _mutant(
        "gradient-of-the-next-head",
        DQ,
        "column < DQK)",
        "column < QK_COLUMNS)",
        "attention-bwd-f16-72-gaps",
        "zeros behind a head's dq",
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
        "wide-second-half",
        WIDE_CONSUMER,
        "advanced(own, 2 * H * KEY_PANEL_BYTES)",
        "own",
        WIDE,
        "the queries' second half meets the keys' first",
    ),
    # ---- lists of queries under a mask_mod or a prefix
    _mutant(
        "mixed-blocks-as-whole-ones",
        LISTS,
        "ListedBlock::of(m, !every, rank)",
        "ListedBlock::of(m, every, rank)",
        DOCUMENTS,
        "blocks of which some pairs are hidden are not masked",
    ),
    _mutant(
        "place-counts-the-tile-itself",
        LISTS,
        "rank = __popc(here.some >> tile % 32 >> 1);",
        "rank = __popc(here.some >> tile % 32);",
        DOCUMENTS,
        "a tile waits for ever for its own sums",
    ),
    _mutant(
        "queries-of-the-place-in-the-list",
        PRODUCER,
        "auto place = [&] { return LISTED ? own.block() : m; };",
        "auto place = [&] { return m; };",
        DOCUMENTS,
        "the list's first blocks are loaded, whatever it names",
    ),
    _mutant(
        "keys-of-the-first-eight",
        ELEMENTS,
        "own.visible(tile, row, columns[r]) ? x : hidden;",
        "own.visible(tile, row, columns[0]) ? x : hidden;",
        DOCUMENTS,
        "half of the keys are hidden as the other half",
    ),
    _mutant(
        "prefix-hidden",
        ELEMENTS,
        "if (Config::PREFIX && key() + lane / 4 + 8 * r < prefix) low[r]",
        "if (false) low[r]",
        PREFIX,
        "of blocks that see a part the prefix is hidden behind the diagonal",
    ),
    # ---- scores by element, and their gradient
    _mutant(
        "zeros-in-front-of-the-last-queries",
        CONSUMER,
        "query + STEP > w.S_q) zero<STEP, V_COLUMNS>(storage.dout[o().stage], w.S_q - query)",
        "m * STEP + STEP > w.S_q) zero<STEP, V_COLUMNS>(storage.dout[o().stage], w.S_q - m * STEP)",
        SEQUENCES_BY_ELEMENT,
        "behind a packed sequence's end lie zeros already in the step before the last",
    ),
    _mutant(
        "last-entry-alone",
        SCORES,
        "sums[i] += s[i] == 0.f",
        "sums[i] = s[i] == 0.f",
        BIAS,
        "of the entries that share a bias the last one counts",
    ),
    _mutant(
        "queries-of-the-first-entry",
        SCORES,
        "const int entry = Config::Q_VIEW == PACKED ? 0 : step.entry;",
        "const int entry = Config::Q_VIEW == PACKED ? 0 : tile.entry;",
        BIAS,
        "an entry is counted twice, and another is left out",
    ),
    _mutant(
        "row-values-of-the-sequence-before",
        SCORES,
        "(s.q_first / STEP + entry) * STEP",
        "s.q_first / STEP * STEP",
        "attention-bwd-bf16-128-many-tiles-sequences-bias",
        "weights of a packed sequence are those of other rows",
    ),
    _mutant(
        "sign-of-delta",
        SCORES,
        "(dp[i] - delta[i / 2 % 2])",
        "(dp[i] + delta[i / 2 % 2])",
        BIAS,
        "a bias's gradient has the wrong sign of what every row subtracts",
    ),
    _mutant(
        "bias-by-the-first-entry's-keys",
        SCORES,
        "tile.key, sequences.S_k, thread_lane);",
        "tile.key, sequences.at(tile.entry).S_k, thread_lane);",
        BIAS,
        "entries with more keys than the first that shares a bias miss it there",
    ),
    _mutant(
        "bias-of-the-first-head",
        ELEMENTS,
        "StagedPlane<Bias>{plane()}.copy(x.base + w.batch * x.batch + head * x.head,",
        "StagedPlane<Bias>{plane()}.copy(x.base + w.batch * x.batch,",
        BIAS,
        "all heads have the first one's bias",
    ),
    _mutant(
        "bias-of-the-first-of-a-group",
        CONSUMER,
        "if constexpr (BY_ELEMENT) elements.head++;",
        "",
        "attention-bwd-f16-64-causal-bias-f32-gqa",
        "heads that share keys share a bias",
    ),
    _mutant(
        "keys-for-queries",
        ELEMENTS,
        "place(lane / 16 * 8 + lane % 8, lane / 8 % 2)",
        "place(lane / 8 % 2 * 8 + lane % 8, lane / 16)",
        BIAS,
        "eight keys of a bias take the place of eight queries",
    ),
    _mutant(
        "mask-not-applied",
        ELEMENTS,
        "if (!seen.of[i]) x = -infinity();",
        "",
        MASK,
        "hidden pairs have weights",
    ),
    # ---- fences
    _mutant(
        "handing-fence",
        CONSUMER,
        "async_proxy_fence(); warp_barrier",
        "warp_barrier",
        MANY,
        "ds is handed on before wgmma may read it",
        "order: no proxy fence between fragments and the arrival that hands them over",
    ),
)
