// Fused attention forward for Hopper: out = softmax(scores) · v, and optionally the log-sum-exp of every row, in one launch.
//
// Algorithm: FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608) with a softmax that is guarded by its sums (softmax.h).
// A block is one producer warpgroup and GROUPS consumer warpgroups of 64 queries each. K and V come by TMA in blocks of BN
// keys through rings of STAGES, the queries through one of Q_STAGES. For every block of keys, from the last to the first, a
// consumer issues S = Q·Kᵀ, then O += P·V of the block before, and computes the next P from S while P·V runs. PING_PONG is ping-pong
// scheduling: two consumers alternate in issuing wgmma, so that one's softmax overlaps the other's GEMMs. With EARLY the next
// tile's first Q·Kᵀ starts before this tile's last P·V. The grid is persistent: one block a multiprocessor.
//
// Scores that are more than a multiple of the product, and masks that are no bands, are computed by element (score.h), of functions that
// users write as of a bias, a mask or ALiBi. Where a mask is no band, another kernel says which blocks tiles visit (visible_blocks.h).
//
// Few queries: heads that share keys share a tile's rows, and keys are cut into parts (tiles.h). Their results, in float32, are merged by the
// blocks of a cluster that have a part each (cluster_merge.h), or by another kernel (attention/merge.h). Such rows are stored by threads.
//
// Pages whose rows, or rows from a page to the next, are no multiple of 8 have no boxes: the producer's warpgroup copies them row by row,
// two warps K and two V (row_copying.h).
//
// A masked key never affects a row, even where its V holds NaN or inf. With RECOMPUTE_NAN_ROWS a warp that finds NaN among its results
// recomputes these rows (recompute.h). Otherwise the producer warpgroup's spare warps set non-finite values of masked blocks
// and rows beyond a sequence's end to zero (value_filter.h); rows that do see such a value get it added at the end.
//
// Shared memory: Q_STAGES·64·GROUPS·DQK + STAGES·BN·(DQK + DV) elements, dims rounded up to 64; GROUPS·4·OUT_STAGES·2 KB; 1 KB.
// Registers of a consumer's thread: BN/2 of S, BN/4 of P, DV/2 of O, and about 30.
#include "sm90/attention/cluster_merge.h"
#include "sm90/attention/consumer.h"
#include "sm90/attention/producer.h"
#include "sm90/attention/row_copying.h"

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS, Config::BLOCKS));

KS_BODY(THREADS, Config::BLOCKS)
attention_forward_sm90_body(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, const TensorMap& out_map,
                            const Operands& operands, const Sequences& sequences, const TileCount& count, const ScoreArguments& score,
                            const SmallCap& small_cap, const VisitedBlocks& visited = {}, const OperandScales& scales = {}) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const Maps maps{q_map, k_map, v_map, out_map};
  const Rings rings{{shared_address(storage.q_ring)}, {shared_address(storage.k_ring)}, {shared_address(storage.v_ring)},
                    {shared_address(storage.v_loaded)}};
  const Scores scores{sequences.S_q, sequences.S_k, score.left, score.right, 0, score.scale_log2, score.cap, score.cap_inverse};

  if (thread_index() == CONSUMERS) tensor_map_prefetch(q_map), tensor_map_prefetch(k_map), tensor_map_prefetch(v_map);
  if constexpr (BM < TILE_ROWS) clear_spare_rows(storage);
  if (thread_index() == 0) {
    rings.q.init(4 * GROUPS / Q_BOXES);  // a warp's lane each
    rings.k.init(4 * GROUPS, Keys::COPIED ? COPYING_WARPS * WARP : 1);
    rings.v.init(4 * GROUPS + (FILTERS_VALUES && !Keys::COPIED), E4M3 ? TRANSPOSING_WARPS : Keys::COPIED ? COPYING_WARPS * WARP : 1);
    Keys::init(storage.loader);
    if (E4M3) rings.v_loaded.init(TRANSPOSING_WARPS);
    else for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&storage.v_loaded[i]), 1);
    barrier_init_fence();
  }
  block_barrier();
  earlier_kernels_wait();
  next_kernel_launch();

  const int group = warp_index() / 4, warp = warp_index() % 4;
  if (group == GROUPS) {
    registers_dealloc<Config::PRODUCER_REGISTERS>();
    if (Keys::Loader::THREADS == WARP ? warp == 0 : thread_index() == CONSUMERS) {
      TileScheduler<BM, BN> scheduler{count, sequences, score, visited};
      Producer{storage, maps, rings, {operands.keys, storage.loader}, visited}.run(scheduler, operands, scales);
    } else if (warp > 0) {
      if constexpr (E4M3) transpose_values(storage, rings, warp - 1);
      else if constexpr (Keys::COPIED) copy_rows(storage, rings, operands.keys, warp);
      else if (FILTERS_VALUES) filter_values(storage, rings, thread_index() - CONSUMERS - WARP);
    }
  } else {
    registers_alloc<Config::CONSUMER_REGISTERS>();
    Consumer consumer({storage, maps, rings, operands, visited, {scores, small_cap, score}, group, warp, lane()});
    consumer.run();
    if constexpr (IN_CLUSTER) cluster_barrier(), merge_in_cluster(consumer, count.parts);
  }
  if constexpr (IN_CLUSTER) {
    if (group == GROUPS) cluster_barrier();
    cluster_barrier();  // no block leaves while others read its part
  }
}
