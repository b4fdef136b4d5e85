// Latent attention (MLA's, absorbed) for Hopper: all heads share keys of 576 elements, whose first 512 are the values too.
//
// Algorithm: flash-decoding over a list of work that is cut evenly (latent_list.h), FlashAttention-2's online softmax with a
// reference that grows by 8 at least. K is read once, from shared memory twice. A block is two consumer warpgroups and one that loads:
//   scores:  S = Q·Kᵀ of 64 rows and 64 keys, softmax, P to shared memory; and O[:, :256] += P·K[:, :256], P from registers
//   columns: O[:, 256:] += P·K[:, 256:512], P from shared memory
//   load:    K through a ring of two tiles in halves; the queries. TMA brings whole tiles, where a page holds all of their rows; others, and
//            all where a tile has few rows, come row by row, by cp.async, wherever pages have them
// The two consumers of P exchange through named barriers: P and the factors of its rows are ready (FULL), have been read (EMPTY).
// Where products bound it, blocks taking the same keys side by side, the second consumer multiplies while the first one makes its next
// softmax: it waits until the next scores are made (SCORES_MADE). Else keys would be handed back later for nothing.
// Where a block has a part of an item's keys alone, it leaves its o and log-sum-exp in the workspace for latent_merge.h.
// A tile's rows are queries with their heads. Keys that none of them sees arrive as zeros. Where queries of a tile see other keys
// (causal, fewer than 64 heads), the scores of those that a row does not see are masked, and elements of theirs that are not finite
// become zeros once the scores are made: 0 · NaN is NaN.
//
// Keys in 8 bits whose rows have their scales (ROW_SCALES) become rows of T on their way (latent_scaled_rows.h), by two blocks of a cluster
// half of them each, where an even number takes them side by side; where a tile has few rows, they are used as they lie
// (latent_few_rows.h).
//
// Shared memory: 72 KB of queries, two tiles of 72 KB of keys, 8 KB of P, barriers and factors.
// Registers of a consumer's thread: 128 of O; of the first one 32 of S and 16 of P more.
#include "sm90/attention/latent_few.h"
#include "sm90/attention/latent_scaled_rows.h"
#include "sm90/attention/latent_wide.h"

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + Config::CONSUMER_REGISTERS + Config::COLUMN_REGISTERS, THREADS));

KS_KERNEL(THREADS, 1)
attention_latent_sm90(KS_ARGUMENT TensorMap k_map, KS_ARGUMENT Operands operands, KS_ARGUMENT List list, KS_ARGUMENT Pages pages,
                      int boxes, int staggered) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const Ring<STAGES> k_rings[2]{{shared_address(storage.k_rings[0])}, {shared_address(storage.k_rings[1])}};
  const Ring<1> q_ring{shared_address(storage.q_ring)};
  if (thread_index() == 0) {
    tensor_map_prefetch(k_map);
    for (int part = 0; part < 2; part++) k_rings[part].init(BY_ROWS ? 4 : CLUSTER, BY_ROWS && boxes ? 1 : 128);
    q_ring.init(FEW ? 2 : 1, BY_ROWS ? 4 - (boxes != 0) : 128);
    barrier_init_fence();
  }
  if (CLUSTER > 1) cluster_barrier();
  else block_barrier();
  earlier_kernels_wait();
  next_kernel_launch();

  const int group = warp_index() / 4, warp = warp_index() % 4;
  Piece piece;
  piece.member = list.member(block_index());
  if (!first_piece(list, list.group(block_index()), piece)) return;
  const Pieces pieces{list, storage.pieces[warp_index()]};
  if (!pieces.find(piece)) return;
  if (group == LOAD) {
    registers_dealloc<Config::PRODUCER_REGISTERS>();
    const Producer producer{storage, operands, pages, k_rings, q_ring, thread_index() % 128};
    if (BY_ROWS) RowProducer{producer, boxes != 0}.run(pieces);
    else if (Config::ROW_SCALES) ScaledProducer{producer}.run(pieces);
    else CopyingProducer{producer, k_map, boxes != 0}.run(pieces);
  } else {
    if constexpr (FEW) {
      registers_alloc<Config::CONSUMER_REGISTERS>();
      const FewThread thread{storage, operands, k_rings, q_ring, group, warp, lane()};
      if constexpr (BY_ROWS) FewConsumer<RowProducts>(thread).run(pieces);
      else FewConsumer<TileProducts>(thread).run(pieces);
      return;
    }
    const Consumer both{storage, operands, list, k_rings, q_ring, boxes != 0, staggered != 0, warp, lane()};
    if (group == SCORES) {
      registers_alloc<Config::CONSUMER_REGISTERS>();
      ScoreConsumer{both}.run(pieces);
    } else {
      if constexpr (Config::COLUMN_REGISTERS < launched_registers(THREADS)) registers_dealloc<Config::COLUMN_REGISTERS>();
      else registers_alloc<Config::COLUMN_REGISTERS>();
      ColumnConsumer{both}.run(pieces);
    }
  }
  if (CLUSTER > 1) cluster_barrier();  // the other block's last arrivals
}
