"""Bugs planted in Hopper's kernels, of kinds that only these have: phases, slots, fences,
descriptors, tile orders. One or two of a kind and kernel.

benchmarks/platform_mutants.py runs them on a GPU, each in a process that is ended where it hangs,
on its case first: a case of the matrix, or of fast_cases.py, where blocks meet several tiles.
``reported``: what finds a bug without a GPU, if anything does: "order: " and a rule of
tests/crosscompile/test_order.py over the PTX; "log", the assembler's, which serialises the
products; "words", tests/host/test_sm90_device_functions.py, which runs the plain C++ on the host.
``LUCK``: those of which a GPU may show nothing, since what they leave out is nearly always over by
then.
"""

from __future__ import annotations

import sm90_gradient_mutants
import sm90_latent_mutants
import sm90_score_mutants
from mutant import Mutant

ORDER = "order: "
PIPELINE, WGMMA = "sm90/pipeline.h", "sm90/wgmma.h"
FORWARD, PRODUCER, CONSUMER, CONSUMER_ROWS, OUTPUT = (
    f"sm90/attention/{name}.h"
    for name in ("forward", "producer", "consumer", "consumer_rows", "output")
)
CLUSTER_MERGE = "sm90/attention/cluster_merge.h"
BLOCK, RECOMPUTE, SOFTMAX, TILES, SUMS = (
    f"sm90/attention/{name}.h" for name in ("block", "recompute", "softmax", "tiles", "sums")
)
VALUE_FILTER, VALUE_TRANSPOSE, PAGED_KEYS = (
    f"sm90/attention/{name}.h" for name in ("value_filter", "value_transpose", "paged_keys")
)
GEMM, GEMM_MATRIX, GEMM_PRODUCER, GEMM_CONSUMER, GEMM_EPILOGUE, GEMM_TILES = (
    f"sm90/gemm/{name}.h"
    for name in ("gemm", "matrix", "producer", "consumer", "epilogue", "tiles")
)
GEMM_EXPRESSION, GEMM_PANELS, GEMM_REDUCTIONS, GEMM_JOINED_PARTS, GEMM_SPLIT_SUMS = (
    f"sm90/gemm/{name}.h"
    for name in ("expression", "panels", "reductions", "joined_parts", "split_sums")
)
GEMM_HEADS, GEMM_BLOCK, GEMM_SCALES, GEMM_GROUPS, TF32_CONSUMER = (
    f"sm90/gemm/{name}.h" for name in ("heads", "block", "scale_loader", "groups", "tf32_consumer")
)

MANY, ONE_BLOCK, LONG = (
    f"attention-bf16-128-many-tiles{what}" for what in ("", "-one-block", "-long")
)
CAUSAL = "attention-bf16-128-causal-many-tiles"
CLUSTER, CLUSTER_NAN = (
    f"attention-bf16-128-causal-few-queries{what}" for what in ("", "-nan-in-v")
)
SEQUENCES = "attention-f16-64-causal-many-tiles-sequences"
HIDDEN = "attention-bf16-128-causal-nan-in-hidden-v"
REMADE = "attention-f16-64-causal-nan-in-hidden-v"
PAGED_16, PAGED_GQA = (f"{CAUSAL}-pages-{what}" for what in ("16", "gqa"))
PAGED_FIVE, FIVE = f"{CAUSAL}-pages-five-heads", "attention-bf16-128-causal-few-queries-five-heads"
PAGED_APART = "attention-f16-96-many-tiles-pages-16"
E4M3, E4M3_LONG, E4M3_RISES, E4M3_RISES_ALONE, E4M3_FAR, E4M3_SCALED = (
    f"attention-bf16-128-many-tiles-e4m3{what}"
    for what in ("", "-long", "-rises", "-rises-every-24", "-rises-far", "-one-block")
)
E4M3_HIDDEN = f"{CAUSAL}-e4m3-nan-in-v"
NT, ADDED, ONE, LISTS = (
    f"gemm-{kind}-many-tiles{what}"
    for kind, what in (
        ("f16-nt", ""),
        ("bf16-nt", "-added"),
        ("bf16-nt", "-one-matrix"),
        ("f16-nt", "-pointers"),
    )
)
GATE, EPILOGUE, SOURCES = (
    f"gemm-{kind}-many-tiles-{what}"
    for kind, what in (("bf16-nt", "gate"), ("bf16-nt", "silu"), ("f16-nn", "in-turn"))
)
SUMMED_ROWS = "gemm-bf16-nt-many-tiles-sums"
WHOLE_SUMS = "gemm-bf16-nt-many-tiles-sums-one-matrix"
SCALED, SCALED_MATRIX = (f"gemm-e4m3fn-nt-many-tiles-blocks{what}" for what in ("", "-one-matrix"))
HALVES, PAGES, FEW_TOKENS = (
    f"qkv-projection-f16-{what}"
    for what in ("tiles-halves-128-of-128", "tiles-halves-pages", "few-tokens")
)
ROUNDED, SPLIT, TURNED = (
    f"gemm-f32-{ops}-many-tiles-{precision}"
    for ops, precision in (("nt", "tf32"), ("nt", "tf32x3"), ("nn", "tf32"))
)


def _mutant(
    name: str, place: str, find: str, plant: str, case: str, what: str, said: str = ""
) -> Mutant:
    implementation = "sm90-tf32" if place.startswith("sm90/gemm/tf32") else "sm90"
    if place.startswith("sm90/attention/") and "e4m3" in case:
        implementation = "sm90-e4m3"
    return Mutant(name, place, find, plant, case, said, what, implementation=implementation)


MUTANTS = (
    # ---- epilogues
    _mutant(
        "gate-of-the-wrong-half",
        GEMM_EXPRESSION,
        "own.value(x, (&x)[APART], tile",
        "own.value((&x)[APART], x, tile",
        GATE,
        "what the second half's columns have is the gate",
    ),
    _mutant(
        "halves-from-one",
        GEMM_BLOCK,
        "(j < BN / 2 ? 0 : (unsigned)a.N / 2 - BN / 2)",
        "0",
        GATE,
        "both halves of a tile's columns are of the first half of B",
    ),
    _mutant(
        "written-after-the-epilogue",
        GEMM_CONSUMER,
        "        store<true>(acc, p, {",
        "        Expression(a, p, p.row + first_row(), thread_lane).apply(acc, a, 0, C_PANELS);\n"
        "        store<true>(acc, p, {",
        EPILOGUE,
        "the second result is what the epilogue makes, not what it is of",
    ),
    _mutant(
        "rows-of-the-first-64",
        GEMM_EXPRESSION,
        "own.row(tile, row0 + 64 * i + 8 * half)",
        "own.row(tile, row0 + 8 * half)",
        GATE,
        "a consumer's second 64 rows take the first's values of rows",
    ),
    _mutant(
        "sums-beyond-the-last-row",
        GEMM_EXPRESSION,
        "at, block.row + 64 * i + 8 * half < block.rows, n",
        "at, true, n",
        SUMMED_ROWS,
        "columns have sums of rows that there are not",
    ),
    _mutant(
        "sums-of-the-strip-before",
        GEMM_REDUCTIONS,
        "            part = 0.f;\n",
        "",
        SUMMED_ROWS,
        "a strip's parts are not begun anew behind it",
    ),
    _mutant(
        "sums-of-the-other-column",
        GEMM_REDUCTIONS,
        "odd ? x[0] : x[1], 8",
        "odd ? x[1] : x[0], 8",
        SUMMED_ROWS,
        "lanes join parts of two columns",
    ),
    _mutant(
        "sums-of-the-first-64-rows",
        GEMM_EXPRESSION,
        "return KEPT_COLUMNS * i + EACH",
        "return EACH",
        SUMMED_ROWS,
        "a consumer's second 64 rows keep their parts where the first's lie",
    ),
    _mutant(
        "sums-of-two-warps",
        GEMM_REDUCTIONS,
        "join<I>(join<I>(x[0], x[1]), join<I>(x[2], x[3]))",
        "join<I>(x[0], x[1])",
        SUMMED_ROWS,
        "half of a consumer's warps are left out",
    ),
    _mutant(
        "sums-of-a-strip's-end",
        GEMM_REDUCTIONS,
        ": strip_column * STRIP_COLUMNS;",
        ": column;",
        WHOLE_SUMS,
        "a strip that ends beyond the last column is left out",
    ),
    _mutant(
        "the-others-slices",
        "sm90/gemm/block.h",
        "(Config::SUMMED ? batch_group * head_group : 1) + source_stages();",
        "(Config::SUMMED ? batch_group * head_group : 1);",
        SOURCES,
        "a consumer takes the other's source tile for its first slice",
    ),
    # ---- phases
    _mutant(
        "phase-not-flipped",
        PIPELINE,
        "if (++stage == STAGES) stage = 0, parity ^= 1;",
        "if (++stage == STAGES) stage = 0;",
        MANY,
        "a ring's second turn waits for its first",
        "words",
    ),
    _mutant(
        "full-before-it-is-loaded",
        PRODUCER,
        "1}; PipelineState<V_STAGES> v{0, 1",
        "0}; PipelineState<V_STAGES> v{0, 0",
        MANY,
        "the producer waits for the end of a phase before anyone was in it",
    ),
    # ---- waits
    _mutant(
        "full-not-waited",
        PIPELINE,
        "barrier_wait(full(state), state.parity);",
        "",
        MANY,
        "tiles are used before they are there",
    ),
    _mutant(
        "empty-not-waited",
        PIPELINE,
        "barrier_wait(empty(state), state.parity);",
        "",
        LONG,
        "stages in use are loaded over",
    ),
    _mutant(
        "scores-not-waited",
        CONSUMER,
        "wgmma_wait<PENDING>();",
        "",
        MANY,
        "a step's scores are read while they are summed",
        "log",
    ),
    _mutant(
        "result-not-waited",
        CONSUMER,
        "finish_pv(); if constexpr (LISTED",
        "pin(o); release_v(); if constexpr (LISTED",
        MANY,
        "P·V is not waited for before the next",
        "order: a step begins while products of the one before run",
    ),
    _mutant(
        "last-result-not-waited",
        CONSUMER,
        "finish_pv();\n    store",
        "pin(o); release_v();\n    store",
        "attention-f16-192v128-many-tiles",
        "a tile is stored before it is done",
        "order: results are stored while products run",
    ),
    # ---- slots
    _mutant(
        "keys-released-early",
        CONSUMER,
        "finish_qk<1>(s); release_qk(begin, tile); const",
        "release_qk(begin, tile); finish_qk<1>(s); const",
        LONG,
        "keys are handed back while the product reads them",
        "order: a slot is handed back while products read it",
    ),
    _mutant(
        "released-by-one-consumer",
        FORWARD,
        "rings.k.init(4 * GROUPS, ",
        "rings.k.init(4, ",
        LONG,
        "one consumer's arrivals make a stage empty",
    ),
    _mutant(
        "few-tiles-known",
        BLOCK,
        "constexpr int WORK_SLOTS = 8;",
        "constexpr int WORK_SLOTS = 2;",
        ONE_BLOCK,
        "a tile's coordinates are written over while consumers need them",
    ),
    _mutant(
        "the-others-turn",
        CONSUMER,
        "1 - group, CONSUMERS",
        "group, CONSUMERS",
        MANY,
        "a consumer gives the turn to itself",
    ),
    # ---- bytes
    _mutant(
        "more-bytes-than-come",
        PRODUCER,
        "(k), K_BYTES);",
        "(k), K_BYTES + 16);",
        MANY,
        "the keys are never full",
    ),
    _mutant(
        "half-of-the-bytes",
        PRODUCER,
        "barrier_arrive_expect_tx(full, V_BYTES);",
        "barrier_arrive_expect_tx(full, V_BYTES / 2);",
        MANY,
        "values count as full with half of them",
    ),
    # ---- fences
    _mutant(
        "barriers-fence",
        FORWARD,
        "barrier_init_fence();\n  }",
        "}",
        MANY,
        "TMA may not see the barriers made",
        "order: no fence between barriers that are made and the block's meeting",
    ),
    _mutant(
        "first-products-fence",
        CONSUMER,
        "k); wgmma_fence(); start_qk",
        "k); start_qk",
        MANY,
        "the same of a tile's first product",
        "order: no fence between registers written and the products that use them",
    ),
    _mutant(
        "store-fence",
        OUTPUT,
        "async_proxy_fence(); warp_barrier",
        "warp_barrier",
        MANY,
        "TMA may store what was in shared memory before",
        "order: no proxy fence between stores to shared memory and TMA's reading of it",
    ),
    _mutant(
        "filter-fence",
        VALUE_FILTER,
        "storage.v_filtered[block.tile] = 1;\n      async_proxy_fence();",
        "storage.v_filtered[block.tile] = 1;",
        HIDDEN,
        "products may read values that were taken out",
        f"{ORDER}no proxy fence between stores to shared memory and the meeting of those who "
        "made them",
    ),
    _mutant(
        "staging-not-read",
        OUTPUT,
        "if (lane == 0) tma_store_wait_read<0>();",
        "",
        "attention-f16-192v128-many-tiles",
        "a panel is written while the one before is stored from there",
        "order: a panel is written while stores from it have not been read",
    ),
    _mutant(
        "stores-not-waited",
        CONSUMER,
        "if (thread_lane == 0) tma_store_wait<0>();\n  }",
        "}",
        MANY,
        "a block ends with stores on their way out of its shared memory",
        "order: a block ends with stores on their way",
    ),
    # ---- parts of the keys in a cluster
    _mutant(
        "rings-not-read",
        OUTPUT,
        "named_barrier_sync(READ, CONSUMERS);",
        "",
        CLUSTER,
        "a part's rows are stored where another warp's product still reads",
    ),
    _mutant(
        "parts-not-there",
        FORWARD,
        "cluster_barrier(), merge_in_cluster(consumer, count.parts);",
        "merge_in_cluster(consumer, count.parts), cluster_barrier();",
        CLUSTER,
        "other blocks' parts are read before they are stored",
    ),
    _mutant(
        "own-part-alone",
        CLUSTER_MERGE,
        "place % CHUNKS * 4), n, x[k][n]);",
        "place % CHUNKS * 4), cluster_rank(), x[k][n]);",
        CLUSTER,
        "a block merges its own part with itself",
    ),
    _mutant(
        "part-not-weighted",
        CLUSTER_MERGE,
        "weight = exp2_fast(s[k][n] - top);",
        "weight = 1.f;",
        CLUSTER,
        "parts count alike",
    ),
    _mutant(
        "given-back-to-the-result",
        "sm90/attention/consumer_thread.h",
        "return IN_CLUSTER ? (Stored*)part_row(row - w.row)",
        "return IN_CLUSTER ? (Stored*)part_row((row - w.row) ^ 1)",
        CLUSTER_NAN,
        "seen NaN come to the next row of a part",
    ),
    # ---- descriptors and swizzles
    _mutant(
        "stride-offset",
        WGMMA,
        '"0x40000040',
        '"0x40000020',
        "attention-f16-64",
        "eight rows are 512 bytes from the next eight",
        "words",
    ),
    _mutant(
        "leading-offset",
        WGMMA,
        "return panel >> 4 << 16",
        "return panel >> 5 << 16",
        "attention-f16-128",
        "columns of V beyond 64 are half a panel away",
        "words",
    ),
    _mutant(
        "depth-of-values",
        CONSUMER,
        ": 2 * VBlock::",
        ": VBlock::",
        "attention-f16-64",
        "16 deeper in V is 8 rows on",
    ),
    _mutant(
        "result-not-swizzled",
        OUTPUT,
        "(chunk + lane / 16) ^ lane % 8",
        "chunk + lane / 16",
        "attention-f16-64",
        "TMA takes the result's chunks for swizzled",
    ),
    # ---- tiles
    _mutant(
        "counter-not-reset",
        PRODUCER,
        "a.counter[0] = 0, a.counter[1] = 0, a.counter[2] = 0;",
        "a.counter[1] = 0, a.counter[2] = 0;",
        CAUSAL,
        "the second launch begins where the first ended",
    ),
    _mutant(
        "a-tile-is-skipped",
        PRODUCER,
        "scheduler.beginners(gridDim.x) :",
        "scheduler.beginners(gridDim.x) + 1 :",
        CAUSAL,
        "no block takes the counter's first tile",
    ),
    _mutant(
        "section-width",
        TILES,
        "min_of(count.section, fore - first);",
        "count.section;",
        "attention-f16-64-causal-many-tiles",
        "the section before the last is as wide as the others",
        "words",
    ),
    _mutant(
        "head-of-a-tile",
        TILES,
        "entry * count.heads",
        "entry * count.batch",
        MANY,
        "a head is beyond the last",
        "words",
    ),
    _mutant(
        "tile-of-the-next-sequence",
        TILES,
        "__ballot_sync(~0u, t - before < upto)",
        "__ballot_sync(~0u, t - before <= upto)",
        SEQUENCES,
        "a sequence has a tile more than it has",
        "words",
    ),
    _mutant(
        "hidden-tile-ends-all",
        TILES,
        "w.end = begin < end ? end : 1;",
        "w.end = end;",
        "attention-f16-64-causal-many-tiles-masked",
        "a tile that sees nothing is taken for the last",
        "words",
    ),
    _mutant(
        "open-blocks",
        TILES,
        "w.unmasked_end = all.end / BN",
        "w.unmasked_end = divide_up(all.end, BN)",
        HIDDEN,
        "the block of the diagonal counts as open",
        "words",
    ),
    # ---- the filter of values
    _mutant(
        "nothing-is-cleaned",
        VALUE_FILTER,
        "non_finite = !filter.finite();",
        "non_finite = false;",
        HIDDEN,
        "hidden NaN reach the result",
    ),
    _mutant(
        "nothing-is-given-back",
        CONSUMER_ROWS,
        "if (x != 0.f) to[d] = convert<Stored>(to_sum(to[d]) + x);",
        "",
        HIDDEN,
        "seen NaN and inf are lost",
    ),
    # ---- rows that are made again
    _mutant(
        "remade-of-hidden-keys",
        CONSUMER_ROWS,
        "scores.any(row, row)",
        "KeyRange{scores.any(row, row).begin, min_of(w.end * BN, scores.S_k)}",
        REMADE,
        "a row is made again of keys that it does not see",
    ),
    _mutant(
        "remade-without-fade",
        RECOMPUTE,
        "] * correction",
        "]",
        REMADE,
        "earlier keys keep their reference",
    ),
    # ---- softmax
    _mutant(
        "never-rebased",
        CONSUMER,
        "__any_sync(~0u, !fits), 0)",
        "false, 0)",
        "attention-f16-64-rises-sums",
        "weights outgrow a half",
    ),
    _mutant(
        "sums-not-rebased",
        SOFTMAX,
        "; sum[r] *= correction[r], l[r] *= correction[r]",
        "; sum[r] *= correction[r]",
        "attention-f16-64-rises-sums",
        "earlier sums keep their reference",
    ),
    # ---- head dims that do not fill what is multiplied
    _mutant(
        "columns-of-the-next-head",
        SOFTMAX,
        "WHOLE || d + column < DEPTH",
        "true",
        "attention-f16-72-rises-infinite",
        "scores that are made again take the columns behind a head, too",
    ),
    _mutant(
        "a-key-too-many",
        SOFTMAX,
        "if (key >= high[r] ||",
        "if (key > high[r] ||",
        "attention-bf16-128-causal-250x250",
        "a query sees the key after its last",
    ),
    _mutant(
        "keys-beyond-the-end",
        CONSUMER_ROWS,
        "return block * BN < all.begin || (block + 1) * BN > all.end;",
        "return false;",
        "attention-f16-64",
        "zeros beyond the last key count as keys",
    ),
    _mutant(
        "cap-of-small-scores",
        SOFTMAX,
        "if (below(small.limit)) return LONG;",
        "if (below(100.f * small.limit)) return LONG;",
        "attention-f16-64-softcap-30-extreme",
        "a polynomial of small scores is taken of all",
    ),
    _mutant(
        "lse-without-reference",
        CONSUMER_ROWS,
        "0.69314718056f * (top + log2_fast(sum));",
        "0.69314718056f * log2_fast(sum);",
        "attention-f16-64",
        "an LSE is that of the sums alone",
    ),
    _mutant(
        "lse-beyond-the-rows",
        CONSUMER_ROWS,
        "Config::LSE && own && row < rows_end(w))",
        "Config::LSE && own)",
        "attention-f16-64",
        "LSEs of rows that are not there are written",
    ),
    _mutant(
        "sink-without-fade",
        CONSUMER_ROWS,
        "sum = sum * correction + (sink ==",
        "sum = sum + (sink ==",
        "attention-f16-64-sinks-huge-and-none",
        "sums are not brought to the sink's reference",
    ),
    # ---- products: slices, clusters, lists, what leaves
    _mutant(
        "slice-released-early",
        GEMM_CONSUMER,
        "wgmma_wait<1>();  // the previous slice is done\n      if (s) release(previous);",
        "if (s) release(previous);\n      wgmma_wait<1>();",
        ONE,
        "a slice is handed back while products read it",
        "order: a slot is handed back while products read it",
    ),
    _mutant(
        "handing-fence",
        GEMM_CONSUMER,
        "async_proxy_fence();\n          warp_barrier();",
        "warp_barrier();",
        ONE,
        "TMA may store what was in shared memory before",
        "order: no proxy fence between fragments and the arrival that hands them over",
    ),
    _mutant(
        "source-fence",
        GEMM_CONSUMER,
        "async_proxy_fence();  // reads",
        "// reads",
        ADDED,
        "TMA may overwrite source tiles that are being read",
        "order: no proxy fence between fragments that were read and the meeting of readers",
    ),
    _mutant(
        "slots-handed-back-early",
        GEMM_EPILOGUE,
        "tma_store_wait_read<SLOTS - 1>();",
        "",
        ONE,
        "a buffer is handed back before TMA has read it",
    ),
    _mutant(
        "released-to-itself",
        GEMM_CONSUMER,
        "barrier_arrive_at(ring.empty(from), releasing);",
        "barrier_arrive(ring.empty(from));",
        ONE,
        "a cluster's other block is not told that a stage is empty",
    ),
    _mutant(
        "not-to-the-whole-cluster",
        GEMM_PRODUCER,
        "b_map(), full, x0, x1, x2, x.b.x3, ALL);",
        "b_map(), full, x0, x1, x2, x.b.x3, 1 << rank);",
        ONE,
        "a block keeps its part of B, and the other waits for ever",
    ),
    _mutant(
        "cluster-leaves-early",
        GEMM,
        "if (CLUSTER > 1) cluster_barrier();  // no block",
        "// no block",
        ONE,
        "a block ends while others may arrive at its barriers",
        "order: a block ends while others may arrive at its barriers",
    ),
    _mutant(
        "added-released-early",
        GEMM_CONSUMER,
        "named_barrier_sync(1 + group, 128);  // all four warps have read it",
        "",
        ADDED,
        "one warp hands back what others still read",
        "order: a slot is handed back before all who read fragments there have met",
    ),
    _mutant(
        "depth-of-a-slice",
        GEMM_CONSUMER,
        "32 : 16 * 128;",
        "64 : 16 * 128;",
        NT,
        "16 deeper in B is 64 bytes on",
    ),
    _mutant(
        "chunks-of-a-panel",
        GEMM_PANELS,
        "((2 * j + (lane >> 4)) ^ (lane & 7)) * 16;",
        "(2 * j + (lane >> 4)) * 16;",
        NT,
        "a panel is laid out as if it were not swizzled",
    ),
    _mutant(
        "last-group-of-rows",
        GEMM_TILES,
        "min_of(GROUP_ROWS, rows - g * GROUP_ROWS)",
        "GROUP_ROWS",
        NT,
        "every group of rows counts as whole",
    ),
    _mutant(
        "ranks-of-a-cluster",
        GEMM_TILES,
        "(row * Config::CLUSTER + rank)",
        "row * Config::CLUSTER",
        ONE,
        "a cluster's blocks have the same rows",
    ),
    _mutant(
        "units-mask",
        GEMM_MATRIX,
        "units & 0x7fffffff",
        "units & 0xfffff",
        LISTS,
        "a matrix is less than 16 MiB from the origin",
        "words",
    ),
    # ---- groups
    _mutant(
        "offset-one-group-late",
        GEMM_GROUPS,
        "begin = groups.begin(group);",
        "begin = groups.begin(group + 1);",
        "grouped-gemm-bf16-m-nn-many-tiles",
        "a group begins where it ends",
    ),
    _mutant(
        "tail-into-the-next-group",
        GEMM_BLOCK,
        "(!GROUPED_ROWS || row + 64 <= p.end)",
        "(!GROUPED_ROWS || row < p.end)",
        "grouped-gemm-bf16-m-nn-many-tiles",
        "the last box of a group is stored whole, over rows of the next",
    ),
    _mutant(
        "part-of-a-tile-lost",
        "sm90/gemm/tail_sums.h",
        "part < others; part++",
        "part < others - 1; part++",
        "grouped-gemm-bf16-m-nn-many-tiles-cut",
        "the last of the other blocks' sums of a tile is left out",
    ),
    _mutant(
        "parts-of-a-tile-not-waited-for",
        "sm90/gemm/tail_sums.h",
        "while (load_acquire(counter) != (u32)others) {}",
        "",
        "grouped-gemm-bf16-m-nn-many-tiles-cut",
        "a tile's sums are added up before the other blocks have written them",
    ),
    _mutant(
        "parts-of-a-number-not-waited-for",
        GEMM_JOINED_PARTS,
        "waits |= part[j] == 0;",
        "waits = false;",
        "gemm-bf16-nt-sums-at-once",
        "a number's parts are added up before they are there",
    ),
    _mutant(
        "number-of-fewer-parts-lost",
        GEMM_BLOCK,
        "end < parts ? end / of : divide_up(parts, of)",
        "min_of(end, parts) / of",
        "gemm-bf16-nt-sums-at-once",
        "the last number, of fewer parts than the others, is nobody's",
        "words",
    ),
    _mutant(
        "columns-begin-with-the-group",
        GEMM_GROUPS,
        "begin / CHUNK * CHUNK + in_columns",
        "begin + in_columns",
        "grouped-gemm-bf16-n-nn-many-tiles",
        "a group's tiles begin at its first column, within 16 bytes of C",
    ),
    _mutant(
        "columns-of-the-group-before",
        "sm90/gemm/result.h",
        "to.columns - column, to.first - column",
        "to.columns - column",
        "grouped-gemm-bf16-n-nn-many-tiles",
        "a group's first chunk of C is stored whole, over columns of the group before",
    ),
    _mutant(
        "panels-beyond-the-columns",
        GEMM_BLOCK,
        "column + columns <= p.end",
        "column < p.end",
        "grouped-gemm-bf16-n-nn-many-tiles",
        "TMA stores a panel that is cut by a group's end, over columns of the next",
    ),
    _mutant(
        "gathered-gate-of-the-wrong-half",
        "sm90/gemm/gather.h",
        "product_column(a, p, 64 * i)",
        "p.column + 64 * i",
        "grouped-gemm-bf16-m-nn-epilogue-gathered",
        "both halves of a gate are columns of the first",
    ),
    _mutant(
        "tail-of-half-a-panel",
        GEMM_CONSUMER,
        "chunk_place<Result::BOX_BYTES>(r, ",
        "chunk_place<128>(r, ",
        "grouped-gemm-bf16-m-nt-many-tiles-gated-in-turns",
        "a group's last rows are read as they lie where boxes are of 64 columns",
    ),
    _mutant(
        "summands-of-the-next-group",
        GEMM_CONSUMER,
        "clear_behind(stage, (p.end - p.begin) % BK);",
        "{}",
        "grouped-gemm-bf16-k-tn-many-tiles",
        "a group's last slice is multiplied with rows of the next",
    ),
    _mutant(
        "beyond-the-map-of-a-list",
        GEMM_GROUPS,
        "group, 0, 0, groups.of_list",
        "group, 0, group, groups.of_list",
        "grouped-lists-bf16-nn-many-tiles",
        "TMA stores matrix number g of a map that has one",
    ),
    _mutant(
        "maps-of-the-list-before",
        GEMM_BLOCK,
        "  if (p.matrix != last)\n",
        "  if (last < 0)\n",
        "grouped-lists-bf16-nn-many-tiles",
        "maps of a launch before, which the unit may have kept, are taken for a group's",
    ),
    _mutant(
        "a-last-band-as-high",
        GEMM_GROUPS,
        "high = min_of(even, rows - band * even);",
        "high = even;",
        "grouped-lists-bf16-nn-many-tiles",
        "a group's last band of tiles has as many rows as the others",
    ),
    _mutant(
        "rows-left-out",
        GEMM_BLOCK,
        "p.row + 64 * first_rows_of(consumer) >= p.end",
        "p.row + 64 * first_rows_of(consumer) + 64 > p.end",
        "grouped-gemm-bf16-m-nn-many-tiles",
        "a consumer leaves out rows of which only the last are behind the group's end",
    ),
    _mutant(
        "stages-of-the-largest-product",
        GEMM_CONSUMER,
        "t < scheduler.total ? slices_of(a, scheduler.tile(t, rank)) + a.source_stages() : 0",
        "a.stages()",
        "grouped-lists-bf16-nt-many-tiles",
        "a consumer passes over as many slices of the other's tile as the largest product has",
    ),
    # ---- heads, and parts of a sum
    _mutant(
        "upper-half-first",
        GEMM_HEADS,
        "(c / UNIT & 1) * (rotary_dim / 2)",
        "(1 - (c / UNIT & 1)) * (rotary_dim / 2)",
        HALVES,
        "the halves of a head are turned the other way about",
        "words",
    ),
    _mutant(
        "last-part-too-long",
        "sm90/gemm/block.h",
        "min_of(part_slices(slices), slices - first)",
        "part_slices(slices)",
        FEW_TOKENS,
        "a part of a sum has more slices than are left",
        "words",
    ),
    _mutant(
        "page-of-the-first-token",
        GEMM_HEADS,
        "page.quotient(t.position)",
        "0",
        PAGES,
        "every token goes to its entry's first page",
    ),
    _mutant(
        "one-part-left-out",
        GEMM_SPLIT_SUMS,
        "for (int from = 1; from < SPLIT; from++)",
        "for (int from = 2; from < SPLIT; from++)",
        FEW_TOKENS,
        "the second block's sums are not added",
    ),
    _mutant(
        "parts-of-the-first-warp-alone",
        GEMM_SPLIT_SUMS,
        "A_ROWS / 16 * WARP",
        "WARP",
        "gemm-f16-nn-few-tokens-of-two-warps",
        "of rows behind the first 16 the other blocks' sums are left out",
    ),
    # ---- TF32: fragments of the left factor, parts of the right one
    _mutant(
        "fragments-fence",
        TF32_CONSUMER,
        "async_proxy_fence();\n    warp_barrier();",
        "warp_barrier();",
        ROUNDED,
        "TMA may write where fragments are not read yet",
        "order: no proxy fence between fragments that were read and the arrival that lets TMA in",
    ),
    _mutant(
        "left-chunks",
        TF32_CONSUMER,
        "(from ^ 64 * j)",
        "from",
        TURNED,
        "of eight k the last four are read where the swizzle has others",
    ),
    _mutant(
        "parts-not-waited",
        TF32_CONSUMER,
        "barrier_wait(shared_address(&storage.split[state.stage]), state.parity);",
        "",
        SPLIT,
        "products read what is not split yet",
    ),
    # ---- e4m3: values transposed on their way, P of 8 bits
    _mutant(
        "keys-in-order",
        VALUE_TRANSPOSE,
        "low = lane < 16 ? 0x6420 : 0x7531,",
        "low = lane < 16 ? 0x6240 : 0x7351,",
        E4M3,
        "the four keys of a word of V are not in the order of P's",
    ),
    _mutant(
        "transposed-before-it-is-loaded",
        VALUE_TRANSPOSE,
        "rings.v_loaded.wait_full(rows);",
        "",
        E4M3,
        "what was in shared memory before is transposed",
    ),
    _mutant(
        "transpose-fence",
        VALUE_TRANSPOSE,
        "async_proxy_fence();\n    warp_barrier();",
        "warp_barrier();",
        E4M3,
        "products may read what was in shared memory before",
        "order: no proxy fence between fragments and the arrival that hands them over",
    ),
    _mutant(
        "nan-transposed",
        VALUE_TRANSPOSE,
        "y[j] &= ~bad, nan |= bad;",
        "nan |= bad;",
        E4M3_HIDDEN,
        "a weight of 0 times a hidden NaN is NaN",
    ),
    _mutant(
        "weights-are-cut-off",
        SOFTMAX,
        "t[2] < LARGEST_E4M3 && t[3] < LARGEST_E4M3;",
        "true;",
        E4M3_RISES_ALONE,
        "weights beyond 448 count as 448 in the second of a thread's two rows",
    ),
    _mutant(
        "headroom",
        SOFTMAX,
        "r]) - HEADROOM",
        "r]) - 12",
        E4M3_RISES,
        "a row is scaled such that it exceeds what e4m3 holds",
    ),
    _mutant(
        "scale-of-keys",
        PRODUCER,
        ") * scales.k.at(w.batch, w.kv_head)",
        ")",
        E4M3_SCALED,
        "keys are not scaled",
    ),
    # ---- sums of e4m3 in shared memory
    _mutant(
        "shared-sums-not-rebased",
        CONSUMER,
        "sums.rescale(correction); rises",
        "rises",
        E4M3_FAR,
        "sums in shared memory keep the old reference",
    ),
    _mutant(
        "sums-of-the-tile-before",
        SUMS,
        "{ blocks = 0; }",
        "{}",
        E4M3_LONG,
        "a tile begins with another's sums",
    ),
    _mutant(
        "fourth-number-of-sums",
        SUMS,
        "0x0400), words[2], 0x4210)",
        "0x4000), words[2], 0x4210)",
        E4M3_LONG,
        "bytes of a number trade places",
    ),
    # ---- e4m3: scales of blocks beside the slices
    _mutant(
        "scales-signalled-early",
        GEMM_SCALES,
        "async_copies_arrive(ring.full(state));",
        "barrier_arrive(ring.full(state));",
        SCALED,
        "a stage counts as full before its scales are there",
    ),
    _mutant(
        "scales-not-counted",
        GEMM_BLOCK,
        "Config::SCALE_K ? 1 + WARP : 1",
        "1",
        SCALED,
        "a stage is full without its scales, or without its slice",
    ),
    _mutant(
        "scales-of-one-slice",
        GEMM_SCALES,
        "rows += by_row.k, columns += by_column.k;",
        "columns += by_column.k;",
        SCALED,
        "every slice has the first one's scales of rows",
    ),
    _mutant(
        "turn-not-handed-over",
        GEMM_CONSUMER,
        "if (Config::IN_TURNS) named_barrier_arrive(TURN + 1 - group, CONSUMERS);",
        "",
        SCALED_MATRIX,
        "each consumer waits for the other",
    ),
    # ---- keys in pages
    _mutant(
        "row-behind-the-last-key",
        VALUE_FILTER,
        "if (VBlock::row_of(i) >= rows)",
        "if (VBlock::row_of(i) > rows)",
        PAGED_16,
        "a page's row that holds no key yet is multiplied by 0, and may be NaN",
    ),
    _mutant(
        "stale-table-entry",
        PAGED_KEYS,
        "look_up(w, chunk - 1, page);",
        "look_up(w, chunk, page);",
        PAGED_16,
        "a chunk has the pages of the one before",
    ),
    _mutant(
        "places-of-keys-for-values",
        PRODUCER,
        ", index, loaded",
        ", index, next",
        PAGED_16,
        "values of a block come from where the next block's keys lie",
    ),
    _mutant(
        "page-of-another-sequence",
        PAGED_KEYS,
        "w.batch * pages.table_row + pages",
        "pages",
        PAGED_16,
        "all sequences have the first one's pages",
    ),
    _mutant(
        "panels-of-pages",
        PAGED_KEYS,
        "Block::PANELS;",
        "1;",
        PAGED_APART,
        "the second panel never comes",
    ),
    _mutant(
        "head-of-a-row",
        TILES,
        "row % GROUP_HEADS",
        "0",
        PAGED_GQA,
        "all heads of a group have the first one's place",
    ),
    _mutant(
        "row-of-the-next-query",
        TILES,
        "return row / GROUP_HEADS",
        "return (row + 1) / GROUP_HEADS",
        PAGED_FIVE,
        "the last head of each query is the next query's",
    ),
    _mutant(
        "rows-of-a-tile-apart",
        CONSUMER,
        "Q_BOXES > 1 ? Q_BYTES : 64 * KBlock::ROW",
        "Q_BYTES",
        FIVE,
        "the second consumer's rows begin with another panel of the first one's",
    ),
    _mutant(
        "spare-rows-stored",
        "sm90/attention/consumer_thread.h",
        "min_of(rows_of(w), w.row + BM)",
        "rows_of(w)",
        PAGED_FIVE,
        "what the rows behind whole queries have, zeros' results, is the next query's",
    ),
    _mutant(
        "values-of-the-other-part",
        CONSUMER,
        "first_column() / 64 * VBlock::PANEL",
        "0",
        "attention-bf16-512-causal",
        "both consumers of a tile's rows multiply the first half of the values' columns",
    ),
    _mutant(
        "class-twice",
        TILES,
        "(i == 0 || s.S_k <= most) &&",
        "",
        PAGED_16,
        "long sequences come again among the short ones",
        "words",
    ),
    _mutant(
        "tile-in-both-lists",
        TILES,
        "(rows <= 64) == (list == FEW_ROWS)",
        "(rows <= 64) <= (list == FEW_ROWS)",
        PAGED_16,
        "long sequences' tiles come with the others' again",
        "words",
    ),
    _mutant(
        "first-of-the-next-32",
        TILES,
        "before += __shfl_sync(~0u, upto, WARP - 1);",
        "before += __shfl_sync(~0u, upto, 0);",
        PAGED_16,
        "tiles behind a batch's first 32 sequences are of other ones",
        "words",
    ),
    *sm90_gradient_mutants.MUTANTS,
    *sm90_latent_mutants.MUTANTS,
    *sm90_score_mutants.MUTANTS,
)

FOUND = "tests/crosscompile/test_order.py finds it"
LUCK = {
    **{m.name: FOUND for m in MUTANTS if m.reported == "log" or m.reported.startswith(ORDER)},
    "last-part-too-long": "results are right, as TMA reads zeros behind K",
    "gradients-semaphore-not-waited": "tiles mostly come in order",
}
"""Why a GPU may show nothing."""
