"""Bugs planted in Hopper's kernels, of kinds that only these have: phases, slots, fences, descriptors, tile orders.

benchmarks/platform_mutants.py runs them on a GPU, each in a process that is ended where it hangs, on its case first: a
case of the matrix, or of fast_cases.py, where blocks meet several tiles. ``reported``: what says so without a GPU, if
anything does: "order", the rules of tests/crosscompile/test_order.py over the PTX; "log", the assembler's, which
serialises the products; "words", tests/host/test_sm90_words.py, which runs the plain C++ among them on the host.
``LUCK``: those of which a GPU may show nothing, since what they leave out is nearly always over by then.
"""

from __future__ import annotations

from mutant import Mutant

PIPELINE, WGMMA = "sm90/pipeline.h", "sm90/wgmma.h"
FORWARD, PRODUCER, CONSUMER = (f"sm90/attention/{name}.h" for name in ("forward", "producer", "consumer"))
GEMM, GEMM_BLOCK, GEMM_PRODUCER, GEMM_CONSUMER, GEMM_STORE, GEMM_TILES = (
    f"sm90/gemm/{name}.h" for name in ("gemm", "block", "producer", "consumer", "store", "tiles")
)
BLOCK, CLEANERS, REMAKE, SOFTMAX, TILES = (
    f"sm90/attention/{name}.h" for name in ("block", "cleaners", "remake", "softmax", "tiles")
)

MANY, ONE_BLOCK, LONG = (f"attention-bf16-128-many-tiles{what}" for what in ("", "-one-block", "-long"))
CAUSAL = "attention-bf16-128-causal-many-tiles"
SEQUENCES, HIDDEN = "attention-f16-64-causal-many-tiles-sequences", "attention-bf16-128-causal-nan-in-hidden-v"
REMADE, CAPPED = "attention-f16-64-causal-nan-in-hidden-v", "attention-f16-64-causal-many-tiles-nan-in-v-capped"
NT, NN, ADDED, ONE, LISTS = (
    f"gemm-{kind}-many-tiles{what}" for kind, what in (
        ("f16-nt", ""), ("bf16-nn", ""), ("bf16-nt", "-added"), ("bf16-nt", "-one-matrix"), ("f16-nt", "-pointers")
    )
)


def _mutant(name: str, place: str, find: str, plant: str, case: str, what: str, said: str = "") -> Mutant:
    return Mutant(name, place, find, plant, case, said, what, implementation="sm90")


MUTANTS = (
    # ---- phases
    _mutant(
        "phase-not-flipped", PIPELINE, "if (++stage == STAGES) stage = 0, parity ^= 1;",
        "if (++stage == STAGES) stage = 0;", MANY, "a ring's second turn waits for its first", "words",
    ),
    _mutant(
        "phase-flipped-at-every-stage", PIPELINE, "if (++stage == STAGES) stage = 0, parity ^= 1;",
        "if (++stage == STAGES) stage = 0; parity ^= 1;", MANY, "stages of one turn have different parities", "words",
    ),
    _mutant(
        "full-before-it-is-loaded", PRODUCER, "Cursor<STAGES> k{0, 1}, v{0, 1};", "Cursor<STAGES> k{0, 0}, v{0, 0};",
        MANY, "the producer waits for the end of a phase before anyone was in it",
    ),
    _mutant(
        "queries-phase", PRODUCER, "Cursor<Q_STAGES * GROUPS> q{0, 1};", "Cursor<Q_STAGES * GROUPS> q{0, 0};", MANY,
        "the same of the queries",
    ),
    _mutant(
        "cleaners-phase", CLEANERS, "for (Cursor<STAGES> v{0, 0};; v.advance())",
        "for (Cursor<STAGES> v{0, 1};; v.advance())", CAUSAL, "cleaners are a turn ahead of the loads",
    ),
    # ---- waits
    _mutant(
        "full-not-waited", PIPELINE, "barrier_wait(full(at), at.parity);", "", MANY,
        "tiles are used before they are there",
    ),
    _mutant(
        "empty-not-waited", PIPELINE, "barrier_wait(empty(at), at.parity);", "", LONG, "stages in use are loaded over",
    ),
    _mutant(
        "next-k-not-waited", CONSUMER, "if (more) barrier_wait(rings.k.full(k) + zero, k.parity);", "", LONG,
        "the next block's keys are taken as they are",
    ),
    _mutant(
        "queries-not-waited", CONSUMER, "if (!KS_EARLY) barrier_wait(rings.q.full(q_place()), q.parity);", "",
        "attention-f16-192v128-many-tiles", "the next tile is taken as it is",
    ),
    _mutant(
        "scores-not-waited", CONSUMER, "next_turn();\n      wgmma_wait<1>();", "next_turn();", MANY,
        "a step's scores are read while they are summed", "log",
    ),
    _mutant(
        "result-not-waited", CONSUMER, "wgmma_wait<0>();\n      pin(o);\n      release_v();\n      if (masked.value)",
        "pin(o);\n      release_v();\n      if (masked.value)", MANY, "P·V is not waited for before the next", "order",
    ),
    _mutant(
        "last-result-not-waited", CONSUMER,
        "wgmma_wait<0>();\n    pin(o);\n    release_v();\n    if (__builtin_expect(store(",
        "pin(o);\n    release_v();\n    if (__builtin_expect(store(", "attention-f16-192v128-many-tiles",
        "a tile is stored before it is done", "order",
    ),
    # ---- slots
    _mutant(
        "keys-released-early", CONSUMER,
        "next_turn(); wgmma_wait<1>(); pin(s); release_k(); if (block == begin) release_q();",
        "next_turn(); release_k(); wgmma_wait<1>(); pin(s); if (block == begin) release_q();",
        LONG, "keys are handed back while the product reads them", "order",
    ),
    _mutant(
        "queries-released-early", CONSUMER, "if (block == begin) release_q();\n      if (KS_SOFTCAP)",
        "release_q();\n      if (KS_SOFTCAP)", LONG, "queries are handed back at every block",
    ),
    _mutant(
        "values-released-twice", CONSUMER,
        "Wgmma<T, DV>::rs(o, p + 4 * j, further(y, j * 16 * 128), 1);\n    wgmma_commit();",
        "Wgmma<T, DV>::rs(o, p + 4 * j, further(y, j * 16 * 128), 1);\n    wgmma_commit();\n"
        "    if (thread_lane == 0) barrier_arrive(rings.v.empty(v));", LONG,
        "values are handed back while the product reads them, and again when it is done", "order",
    ),
    _mutant(
        "released-by-one-consumer", FORWARD, "rings.k.init(4 * GROUPS);", "rings.k.init(4);", LONG,
        "one consumer's arrivals make a stage empty",
    ),
    _mutant(
        "cleaners-not-counted", FORWARD, "rings.v.init(4 * GROUPS + CLEANS);", "rings.v.init(4 * GROUPS);", CAUSAL,
        "the cleaners' arrival stands for a consumer's",
    ),
    _mutant(
        "few-tiles-known", BLOCK, "constexpr int KNOWN = 8;", "constexpr int KNOWN = 2;", ONE_BLOCK,
        "a tile's coordinates are written over while consumers need them",
    ),
    _mutant(
        "the-others-turn", CONSUMER, "named_barrier_arrive(TURN + 1 - group, CONSUMERS);",
        "named_barrier_arrive(TURN + group, CONSUMERS);", MANY, "a consumer gives the turn to itself",
    ),
    # ---- bytes
    _mutant(
        "more-bytes-than-come", PRODUCER, "barrier_expect(rings.k.full(k), K_BYTES);",
        "barrier_expect(rings.k.full(k), K_BYTES + 16);", MANY, "the keys are never full",
    ),
    _mutant(
        "half-of-the-bytes", PRODUCER, "barrier_expect(full, V_BYTES);", "barrier_expect(full, V_BYTES / 2);", MANY,
        "values count as full with half of them",
    ),
    # ---- fences
    _mutant(
        "barriers-fence", FORWARD, "barrier_init_fence();\n  }", "}", MANY, "TMA may not see the barriers made",
        "order",
    ),
    _mutant(
        "products-fence", CONSUMER,
        "wgmma_fence(); start_qk(s); rings.v.wait_full(v); start_pv(); next_turn(); wgmma_wait<1>();",
        "start_qk(s); rings.v.wait_full(v); start_pv(); next_turn(); wgmma_wait<1>();", LONG,
        "registers that a step's products use may not be written yet", "order",
    ),
    _mutant(
        "first-products-fence", CONSUMER,
        "rings.k.wait_full(k);\n      wgmma_fence();\n      start_qk(s);\n      wgmma_wait<0>();",
        "rings.k.wait_full(k);\n      start_qk(s);\n      wgmma_wait<0>();", MANY, "the same of a tile's first product",
        "order",
    ),
    _mutant(
        "store-fence", CONSUMER, "async_proxy_fence();\n      warp_barrier();", "warp_barrier();", MANY,
        "TMA may store what was in shared memory before", "order",
    ),
    _mutant(
        "cleaners-fence", CLEANERS, "at.removed[told.tile] = 1;\n      async_proxy_fence();",
        "at.removed[told.tile] = 1;", HIDDEN, "products may read values that were taken out", "order",
    ),
    _mutant(
        "staging-not-read", CONSUMER, "if (lane == 0) tma_stores_read<0>();", "", "attention-f16-192v128-many-tiles",
        "a panel is written while the one before is stored from there", "order",
    ),
    _mutant(
        "stores-not-waited", CONSUMER, "if (thread_lane == 0) tma_stores_wait<0>();\n}", "}", MANY,
        "a block ends with stores on their way out of its shared memory", "order",
    ),
    # ---- descriptors and swizzles
    _mutant(
        "stride-offset", WGMMA, 'KS_DESCRIPTOR_HIGH "0x40000040"', 'KS_DESCRIPTOR_HIGH "0x40000020"',
        "attention-f16-64", "eight rows are 512 bytes from the next eight", "words",
    ),
    _mutant(
        "swizzle-mode", WGMMA, 'KS_DESCRIPTOR_HIGH "0x40000040"', 'KS_DESCRIPTOR_HIGH "0x80000040"',
        "attention-f16-64", "chunks lie as in a swizzle of 64 bytes", "words",
    ),
    _mutant(
        "leading-offset", WGMMA, "return panel >> 4 << 16", "return panel >> 5 << 16", "attention-f16-128",
        "columns of V beyond 64 are half a panel away", "words",
    ),
    _mutant(
        "address-cut-off", WGMMA, "return 1u << 16 | (address & 0x3ffff) >> 4;",
        "return 1u << 16 | (address & 0xffff) >> 4;", "attention-f16-128", "shared memory ends at 64 KB", "words",
    ),
    _mutant(
        "rank-in-a-descriptor", WGMMA, "<< 16 | (address & 0x3ffff) >> 4; }\nKS_DEVICE u32 further",
        "<< 16 | address >> 4; }\nKS_DEVICE u32 further", NN,
        "in a cluster's second block a bit of its rank is added to the leading offset", "words",
    ),
    _mutant(
        "depth-of-keys", CONSUMER, "further(y, d / 4 * BN * 128 + d % 4 * 32)",
        "further(y, d / 4 * BN * 128 + d % 4 * 64)", "attention-f16-64", "16 deeper in K is 64 bytes on",
    ),
    _mutant(
        "panels-of-keys", CONSUMER, "further(y, d / 4 * BN * 128 + d % 4 * 32)",
        "further(y, d / 4 * 64 * 128 + d % 4 * 32)", "attention-f16-128", "a panel of K has as many rows as one of Q",
    ),
    _mutant(
        "depth-of-values", CONSUMER, "further(y, j * 16 * 128), 1)", "further(y, j * 8 * 128), 1)", "attention-f16-64",
        "16 deeper in V is 8 rows on",
    ),
    _mutant(
        "stage-of-values", CONSUMER, "further(v_tiles, v.stage * V_BYTES);", "v_tiles;", "attention-f16-64",
        "values are always those of the first stage",
    ),
    _mutant(
        "result-not-swizzled", CONSUMER, "stmatrix(line + ((chunk + lane / 16) ^ lane % 8) * 16,",
        "stmatrix(line + (chunk + lane / 16) * 16,", "attention-f16-64", "TMA takes the result's chunks for swizzled",
    ),
    _mutant(
        "last-rows-not-swizzled", CONSUMER, "(panel + r * 128 + (chunk ^ r % 8) * 16);",
        "(panel + r * 128 + chunk * 16);", "attention-f16-64-sequences",
        "a sequence's last rows are taken as if they were not",
    ),
    # ---- tiles
    _mutant(
        "counter-not-reset", PRODUCER, "a.counter[0] = 0, a.counter[1] = 0;", "a.counter[1] = 0;", CAUSAL,
        "the second launch begins where the first ended",
    ),
    _mutant(
        "a-tile-is-skipped", PRODUCER, "(int)atomicAdd(a.counter, 1u) + (int)gridDim.x :",
        "(int)atomicAdd(a.counter, 1u) + (int)gridDim.x + 1 :", CAUSAL, "the first tile of the counter is nobody's",
    ),
    _mutant(
        "tiles-of-a-block", PRODUCER, ": t + (int)gridDim.x;", ": t + (int)gridDim.x + 1;", MANY,
        "blocks walk beside their tiles",
    ),
    _mutant(
        "section-width", TILES, "min_of(count.section, fore - first);", "count.section;",
        "attention-f16-64-causal-many-tiles", "the section before the last is as wide as the others", "words",
    ),
    _mutant(
        "short-tiles-first", TILES, "tile = count.q_tiles - 1 - turn;", "tile = turn;", CAUSAL,
        "a launch ends with its longest tiles: slow, and right", "words",
    ),
    _mutant(
        "head-of-a-tile", TILES, "entry = index / count.heads, head = index - entry * count.heads;",
        "entry = index / count.heads, head = index - entry * count.batch;", MANY, "a head is beyond the last", "words",
    ),
    _mutant(
        "tiles-of-a-sequence", TILES, "before += tiles * count.heads;", "before += tiles;", SEQUENCES,
        "a sequence has as many tiles as one head of it", "words",
    ),
    _mutant(
        "tile-of-the-next-sequence", TILES, "if (t < before + tiles * count.heads) break;",
        "if (t <= before + tiles * count.heads) break;", SEQUENCES, "a sequence has a tile more than it has", "words",
    ),
    _mutant(
        "hidden-tile-ends-all", TILES, "w.end = begin < end ? end : 1;", "w.end = end;",
        "attention-f16-64-causal-many-tiles-masked", "a tile that sees nothing is taken for the last", "words",
    ),
    _mutant(
        "open-blocks", TILES, "w.open_end = scores.all_end(row) / BN;",
        "w.open_end = divide_up(scores.all_end(row), BN);", HIDDEN, "the block of the diagonal counts as open", "words",
    ),
    # ---- cleaners
    _mutant(
        "nothing-is-cleaned", CLEANERS, "odd = !cleaner.finite();", "odd = false;", HIDDEN,
        "hidden NaN reach the result",
    ),
    _mutant(
        "nothing-is-given-back", CONSUMER, "if (x != 0.f) place = convert<T>(to_sum(place) + x);", "", HIDDEN,
        "seen NaN and inf are lost",
    ),
    # ---- rows that are made again
    _mutant(
        "nan-not-looked-for", CONSUMER, "return REMAKES && __any_sync(~0u, has_nan(most));", "return false;", REMADE,
        "hidden NaN stay in the result",
    ),
    _mutant(
        "one-lane-looks-for-nan", CONSUMER, "return REMAKES && __any_sync(~0u, has_nan(most));",
        "return REMAKES && __shfl_sync(~0u, (int)has_nan(most), 0);", REMADE, "only the first lane's NaN count",
    ),
    _mutant(
        "hidden-rows-after", CONSUMER, "again.finite_values(scores.band_end(first),",
        "again.finite_values(scores.band_end(end - 1),", REMADE,
        "values that a warp's last row sees are not looked at, which hide from its first",
    ),
    _mutant(
        "hidden-rows-before", CONSUMER, "again.finite_values(w.begin * BN, scores.band_begin(end - 1))",
        "again.finite_values(w.begin * BN, scores.band_begin(first))", "attention-f16-64-window-nan-in-hidden-v",
        "the same of a window's other side",
    ),
    _mutant(
        "remade-of-hidden-keys", CONSUMER, "again.row(row, scores.band_begin(row), scores.band_end(row));",
        "again.row(row, scores.band_begin(row), min_of(w.end * BN, scores.S_k));", REMADE,
        "a row is made again of keys that it does not see",
    ),
    _mutant(
        "only-the-first-row-remade", CONSUMER, "for (int row = first; row < end; row++) again.row(",
        "for (int row = first; row < first + 1; row++) again.row(", REMADE, "a warp makes one row again",
    ),
    _mutant(
        "seen-nan-replaced", REMAKE, "(l == 0.f ? 0.f : o[i] / l) + odd[i]", "l == 0.f ? 0.f : o[i] / l", REMADE,
        "a NaN that is right, of a value which the row sees, is replaced",
    ),
    _mutant(
        "remade-without-fade", REMAKE, "o[i] = fmaf(p, finite(z) ? z : 0.f, o[i] * fade);",
        "o[i] = fmaf(p, finite(z) ? z : 0.f, o[i]);", REMADE, "earlier keys keep their reference",
    ),
    _mutant(
        "remade-without-sink", CONSUMER, "KS_SINKS ? LOG2_E * a.sinks[w.head] : -infinity(), thread_lane",
        "-infinity(), thread_lane", CAPPED, "rows are made again without their sink",
    ),
    _mutant(
        "remade-without-cap", REMAKE, "if (!KS_SOFTCAP) return s * scale_log2;",
        "return KS_SOFTCAP ? s * cap_inverse * cap : s * scale_log2;", CAPPED,
        "rows are made again of scores that are not capped",
    ),
    # ---- softmax
    _mutant(
        "never-rebased", CONSUMER, "!(sum[0] + sum[1] < LIMIT)), 0)", "false), 0)", "attention-f16-64-rises-sums",
        "weights outgrow a half",
    ),
    _mutant(
        "limit", SOFTMAX, "constexpr float LIMIT = 32768.f;", "constexpr float LIMIT = 3e38f;",
        "attention-f16-64-rises-sums", "weights are kept up to what float32 holds",
    ),
    _mutant(
        "sums-not-rebased", SOFTMAX, "sum[r] *= fade[r], l[r] *= fade[r];", "sum[r] *= fade[r];",
        "attention-f16-64-rises-sums", "earlier sums keep their reference",
    ),
    _mutant(
        "tops-not-rebased", SOFTMAX, "m[r] = now;\n    l[r] *= fade[r];", "m[r] = now;",
        "attention-f16-64-rises-infinite", "the same where a block has to be made again",
    ),
    _mutant(
        "a-key-too-many", SOFTMAX, "if (key >= high[r] ||", "if (key > high[r] ||", "attention-bf16-128-causal-250x250",
        "a query sees the key after its last",
    ),
    _mutant(
        "a-key-too-few", SOFTMAX, "key < low[r]))", "key <= low[r]))", "attention-f16-64-window-16-0",
        "a query does not see its first key",
    ),
    _mutant(
        "keys-beyond-the-end", CONSUMER, "if (HIDES_KEYS || (block + 1) * BN > scores.S_k)", "if (HIDES_KEYS)",
        "attention-f16-64", "zeros beyond the last key count as keys",
    ),
    _mutant(
        "cap-of-small-scores", SOFTMAX, "if (__all_sync(~0u, most < 0.6f)) {", "if (__all_sync(~0u, most < 60.f)) {",
        "attention-f16-64-softcap-30-extreme", "a polynomial of small scores is taken of all",
    ),
    _mutant(
        "lse-without-reference", CONSUMER, "0.69314718056f * (top + log2_fast(sum));",
        "0.69314718056f * log2_fast(sum);", "attention-f16-64", "an LSE is that of the sums alone",
    ),
    _mutant(
        "lse-beyond-the-rows", CONSUMER, "thread_lane % 4 == 0 && row < S_q)", "thread_lane % 4 == 0)",
        "attention-f16-64", "LSEs of rows that are not there are written",
    ),
    _mutant(
        "sink-without-fade", CONSUMER, "sum = sum * fade + (sink ==", "sum = sum + (sink ==",
        "attention-f16-64-sinks-huge-and-none", "sums are not brought to the sink's reference",
    ),
    _mutant(
        "sink-fade-not-squared", CONSUMER, "fade = half * half;", "fade = half;", "attention-f16-64-sinks",
        "sums are brought half the way to the sink's reference",
    ),
    # ---- products: slices, clusters, lists, what leaves
    _mutant(
        "slice-released-early", GEMM_CONSUMER,
        "wgmma_wait<1>();  // the slice before is done\n      if (s) release(before);",
        "if (s) release(before);\n      wgmma_wait<1>();", ONE, "a slice is handed back while products read it",
        "order",
    ),
    _mutant(
        "last-slice-not-waited", GEMM_CONSUMER, "wgmma_wait<0>();\n    release(before);", "release(before);", NT,
        "the last slice's products are not waited for", "order",
    ),
    _mutant(
        "slices-fence", GEMM_CONSUMER, "wgmma_fence();\n#pragma unroll", "\n#pragma unroll", NT,
        "registers that products use may not be written yet", "order",
    ),
    _mutant(
        "handing-fence", GEMM_CONSUMER, "async_proxy_fence();\n          warp_barrier();", "warp_barrier();", ONE,
        "TMA may store what was in shared memory before", "order",
    ),
    _mutant(
        "slots-not-waited", GEMM_CONSUMER, "if (KS_STORE == TMA) out.ring.wait_empty(slot);", "", ONE,
        "a buffer is written while the result before is stored from there",
    ),
    _mutant(
        "slots-handed-back-early", GEMM_STORE, "tma_stores_read<SLOTS - 1>();", "", ONE,
        "a buffer is handed back before TMA has read it",
    ),
    _mutant(
        "tile-stores-not-waited", GEMM_STORE, "tma_stores_wait<0>();", "", ONE,
        "a block ends with stores on their way out of its shared memory", "order",
    ),
    _mutant(
        "released-to-itself", GEMM_CONSUMER, "barrier_arrive_at(ring.empty(from), thread());",
        "barrier_arrive(ring.empty(from));", ONE, "a cluster's other block is not told that a stage is empty",
    ),
    _mutant(
        "released-by-one-block", GEMM, "ring.init(GROUPS * CLUSTER);", "ring.init(GROUPS);", ONE,
        "one block's arrivals make a cluster's stage empty",
    ),
    _mutant(
        "not-to-the-whole-cluster", GEMM_PRODUCER, "(1 << CLUSTER) - 1);", "1 << rank);", ONE,
        "a block keeps its part of B, and the other waits for ever",
    ),
    _mutant(
        "cluster-leaves-early", GEMM, "if (CLUSTER > 1) cluster_barrier();  // no block", "// no block", ONE,
        "a block ends while others may arrive at its barriers", "order",
    ),
    _mutant(
        "bytes-of-a-slice", GEMM_PRODUCER, "barrier_expect(full, STAGE_BYTES);", "barrier_expect(full, A_BYTES);", NT,
        "a slice counts as full without B",
    ),
    _mutant(
        "added-released-early", GEMM_CONSUMER, "named_barrier_sync(1 + group, 128);  // all four warps have read it",
        "", ADDED, "one warp hands back what others still read",
    ),
    _mutant(
        "panels-of-a-slice", GEMM_CONSUMER, "descriptor_mn_major(address, ROWS_BYTES);",
        "descriptor_mn_major(address, 2 * ROWS_BYTES);", NN, "64 columns of B are two panels from the next",
    ),
    _mutant(
        "depth-of-a-slice", GEMM_CONSUMER, "B_STEP = KS_B_TRANSPOSED ? 32 : 16 * 128;",
        "B_STEP = KS_B_TRANSPOSED ? 64 : 16 * 128;", NT, "16 deeper in B is 64 bytes on",
    ),
    _mutant(
        "chunks-of-a-panel", GEMM_CONSUMER, "((2 * j + (thread_lane >> 4)) ^ (thread_lane & 7)) * 16;",
        "(2 * j + (thread_lane >> 4)) * 16;", NT, "a panel is laid out as if it were not swizzled",
    ),
    _mutant(
        "last-group-of-rows", GEMM_TILES, "const int high = min_of(GROUP_ROWS, rows - g * GROUP_ROWS);",
        "const int high = GROUP_ROWS;", NT, "every group of rows counts as whole",
    ),
    _mutant(
        "ranks-of-a-cluster", GEMM_TILES, "(row * KS_CLUSTER + rank) * KS_BM", "row * KS_CLUSTER * KS_BM", ONE,
        "a cluster's blocks have the same rows",
    ),
    _mutant(
        "origin-not-subtracted", GEMM_BLOCK, "((u64)address - (u64)origin) >> 4;", "(u64)address >> 4;", LISTS,
        "a matrix is as far from the origin as from address 0", "words",
    ),
    _mutant(
        "units-mask", GEMM_BLOCK, "units & 0x7fffffff", "units & 0xfffff", LISTS,
        "a matrix is less than 16 MiB from the origin", "words",
    ),
    _mutant(
        "reaches-of-a-matrix", GEMM_BLOCK, "(int)(units >> 31)", "(int)(units >> 32)", LISTS,
        "matrices before the origin are half of all memory away", "words",
    ),
)

LUCK = {
    "barriers-fence": "the binary is the same",
    "products-fence": "the binary is the same",
    "first-products-fence": "the binary is the same",
    "store-fence": "stores to shared memory mostly arrive before TMA reads them",
    "cleaners-fence": "the same of wgmma",
    "stores-not-waited": "a block's shared memory is seldom taken by another so soon",
    "scores-not-waited": "the assembler serialises the products, and waits by itself",
    "short-tiles-first": "results are right",
    "slices-fence": "the binary is the same",
    "handing-fence": "stores to shared memory mostly arrive before TMA reads them",
    "tile-stores-not-waited": "a block's shared memory is seldom taken by another so soon",
    "cluster-leaves-early": "a cluster's blocks seldom end so far apart",
}
"""Why a GPU may show nothing. Where the binary is the same, nvrtc 13.5 put the fence there by itself."""
