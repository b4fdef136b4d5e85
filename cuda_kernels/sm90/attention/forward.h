// Fused attention forward for Hopper: out = softmax(scores) · v, and optionally the log-sum-exp of every row, in one launch.
//
// Algorithm: FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608) with a softmax that is guarded by its sums (softmax.h).
// A block is one warpgroup that loads and GROUPS that multiply, 64 queries each. K and V come by TMA in blocks of BN keys
// through rings of STAGES, the queries through one of Q_STAGES. For every block of keys, from the last to the first, a
// consumer starts S = Q·Kᵀ, behind it O += P·V of the block before, and makes the next P from S while that product runs. With
// TURNS two consumers alternate in issuing products, so that one's softmax runs under the other's products. With EARLY the
// next tile's first Q·Kᵀ starts before this tile's last P·V. Blocks are persistent: as many as multiprocessors.
//
// A key that a row may not see can not reach it, even where V holds NaN or inf. With REMAKE a warp that finds NaN among its
// results makes such rows again (remake.h). Else, and where sequences end within blocks, the loading warpgroup's spare warps
// put zeros in place of what is not finite, in blocks that hide keys, and of rows beyond a sequence's end; rows that see a
// value that was taken out are given it at the end.
//
// Constants (from the kernel definition): those of scores.h and sequences.h; KS_T, KS_DQK, KS_DV, KS_LSE, KS_BN, KS_GROUPS, KS_STAGES,
// KS_Q_STAGES, KS_OUT_STAGES (panels of 16×64 a warp through which O is stored), KS_TURNS, KS_EARLY, KS_DYNAMIC (tiles by a
// counter), KS_REMAKE, KS_AHEAD (elements of S, of BN/2 a thread, whose exponentials come before the wait for P·V; the others'
// run while P is rounded), KS_PRODUCER_REGISTERS, KS_CONSUMER_REGISTERS, KS_SHARED_BYTES.
// Shared memory: Q_STAGES·64·GROUPS·DQ + STAGES·BN·(DQ + DV) elements, dims rounded up to 64; GROUPS·4·OUT_STAGES·2 KB; 1 KB.
// Registers of a consumer's thread: BN/2 of S, BN/4 of P, DV/2 of O, and about 30.
#include "sm90/attention/consumer.h"
#include "sm90/attention/producer.h"

KS_KERNEL(THREADS, 1)
attention_forward_sm90(KS_ARGUMENT TensorMap q_map, KS_ARGUMENT TensorMap k_map, KS_ARGUMENT TensorMap v_map,
                       KS_ARGUMENT TensorMap out_map, Operands operands, Sequences sequences, TileCount count, int left, int right,
                       float scale_log2, float cap, float cap_inverse) {
  extern __shared__ __align__(1024) char memory[];
  Shared& at = *(Shared*)memory;
  const Maps maps{q_map, k_map, v_map, out_map};
  const Rings rings{{shared_address(at.q_ring)}, {shared_address(at.k_ring)}, {shared_address(at.v_ring)}};
  const Scores scores{sequences.S_q, sequences.S_k, left, right, 0, scale_log2, cap, cap_inverse};

  if (thread_index() == 0) {
    rings.q.init(4);  // a warp each
    rings.k.init(4 * GROUPS);
    rings.v.init(4 * GROUPS + CLEANS);
    for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&at.v_landed[i]), 1);
    barrier_init_fence();
  }
  block_barrier();

  const int group = warp_index() / 4, warp = warp_index() % 4;
  if (group == GROUPS) {
    registers_give_back<KS_PRODUCER_REGISTERS>();
    if (thread_index() == CONSUMERS) {
      TileOrder<BM, BN> order{count, sequences, scores, 0, 0};
      Producer{at, maps, rings}.run(order, operands);
    } else if (CLEANS && warp > 0) {
      clean(at, rings, thread_index() - CONSUMERS - WARP);
    }
  } else {
    registers_take<KS_CONSUMER_REGISTERS>();
    Consumer{at, maps, rings, operands, scores, group, warp, lane()}.run();
  }
}
