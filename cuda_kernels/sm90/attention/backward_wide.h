// Attention's gradients for Hopper where those of 64 keys, dk and dv, fill a block's registers: head dims above 128.
// One launch between the two small ones of backward.h, whose formulas it shares.
//
// Algorithm: a cluster of two blocks owns KEYS keys, each block 64 of them, and walks over the queries of its KV head's group, STEP
// at a time. Scores are transposed, keys × queries. A block's two consumers divide the products, not the keys: one makes scores
// and the values' gradient, the other the keys',
//   s = k·qᵀ, p,    dv += p·dout        and        dp = v·doutᵀ, ds = p·(dp − delta),    dk += ds·q
// so that each keeps one gradient of 64 keys in registers, and what is multiplied into it, p or ds, is a register operand. p
// goes from the one to the other as fragments lie, warp by warp, into the memory where ds will be.
// dq of a step sums over the keys of both blocks: each block sends its ds to the other (8 KB, a bulk copy from shared memory to
// shared memory), and each of the four consumers multiplies 64 of the 256 columns, one step late; of 192 the last none. So half as much is added in
// L2 as by blocks alone, which would bound them: 8.6 GB at B4 H8 S4096, at 3.0 TB/s. q and dout are multicast, each block loading
// half. What a consumer issues in step i, and what its warps do meanwhile:
//   dv(i) or dk(i), dq(i−1)      hand stages back
//   s(i+1), or half of dp(i+1)   add dq, once it is there; the other half of dp; then p(i+1) or ds(i+1)
// While the one makes p or ds, the other's products run. p(i+1) has a place when all have multiplied ds(i−1): so of 192 columns the keys'
// consumer issues dq(i−1) before it makes ds(i), beside which it runs, and p(i+1) is made before its place is asked for.
// Of 256 dout comes late, as a step and a half of it have room, and the scores' consumer,
// who is ahead, holds it longest: so nobody waits for the next stages before the last are handed back. The order of sums: dq_semaphore.h.
//
// K, V and the columns of the other block's K that dq takes come by TMA once a tile; q and dout by rings, of
// 256 columns in halves, so that one is handed back while the other is multiplied. The first block of a cluster takes tiles from the
// counter and tells the other.
//
// Bytes of shared memory that a step of D = 256 reads and writes: 352 KB, 2750 clocks, beside 2560 of products.
// Of 192/128: 250 KB, 1940 clocks, beside 1790; a step takes about 3000, most of it from p to ds and back to p's place.
//
// Shared memory, KB: D/8 of K, DV/8 of V, 16 of the other block's K, an eighth of its columns for each part of q and dout, 32 of ds (two steps', both
// blocks' keys), STAGES/2 of row values, and barriers.
// Registers of a consumer's thread: DV/2 of dv or D/2 of dk, 32 of s or dp, 32 of dq, 16 of p or ds, 16 of lse, and about 25.
#include "sm90/attention/backward/wide/consumer.h"
#include "sm90/attention/backward/wide/producer.h"

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS));

KS_KERNEL(THREADS, 1)
attention_backward_wide_sm90(KS_ARGUMENT TensorMap q_map, KS_ARGUMENT TensorMap dout_map, KS_ARGUMENT TensorMap k_map,
                             KS_ARGUMENT TensorMap v_map, KS_ARGUMENT TensorMap dk_map, KS_ARGUMENT TensorMap dv_map,
                             KS_ARGUMENT Operands operands, KS_ARGUMENT Sequences sequences, KS_ARGUMENT TileCount count,
                             KS_ARGUMENT ScoreArguments score, float scale) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const Maps maps{q_map, dout_map, k_map, v_map, dk_map, dv_map};
  const Rings rings{{shared_address(storage.kv_ring)}, {shared_address(storage.q_ring)}, {shared_address(storage.dout_ring)},
                    {shared_address(storage.ds_ring)}, {shared_address(storage.p_ring)}, {shared_address(storage.tile_ring)},
                    {shared_address(storage.semaphores)}};
  const Band band{score.left, score.right};
  const int rank = cluster_rank();

  if (thread_index() == 0) {
    constexpr int ALL = CONSUMERS / WARP, OF_GROUP = ALL / GROUPS;
    rings.kv.init(ALL + (Config::IN_ORDER ? min_of(PIECES - rank * GROUPS, GROUPS) : 0));
    rings.q.init(ALL * CLUSTER);
    rings.dout.init(ALL * CLUSTER);
    rings.ds.init(OF_GROUP * PIECES, OF_GROUP);
    rings.p.init(1, OF_GROUP);
    rings.tile.init(1);
    for (int i = 0; i < GROUPS; i++) rings.semaphores.of(i).init(OF_GROUP);
    barrier_init_fence();
  }
  cluster_barrier();

  next_kernel_launch();
  const int group = warp_index() / 4, warp = warp_index() % 4;
  if (group == GROUPS) {
    if (warp > 0) earlier_kernels_wait();  // for semaphores; the producer waits for row values
    registers_dealloc<Config::PRODUCER_REGISTERS>();
    if (thread_index() == CONSUMERS) Producer{storage, maps, rings, operands, {count, sequences, band, storage.walk}}.run();
    if (Config::IN_ORDER && warp > 0 && warp <= min_of(PIECES - rank * GROUPS, GROUPS) && lane() == 0)
      DqSemaphore<KEYS, 1>{storage.work_tiles, rings.kv, rings.semaphores.of(warp - 1), count, band,
                           storage.semaphores[warp - 1].first, storage.semaphores[warp - 1].block,
                           operands.semaphores + rank * GROUPS + warp - 1}.run();
  } else {
    registers_alloc<Config::CONSUMER_REGISTERS>();
    const Consumer consumer{storage, maps, rings, operands, sequences, count, band, scale, score.scale_log2, score.cap, score.cap_inverse, rank,
                            group, warp, lane()};
    constexpr int LAST = piece_columns(PIECES - 1), FOURTH = PIECES == CLUSTER * GROUPS ? LAST : 0, THIRD = FOURTH ? 64 : LAST;
    if (group == 0 && (THIRD == 64 || rank == 0)) consumer.run<true, 64>();
    else if (group == 0) consumer.run<true, THIRD>();
    else if (FOURTH == 64 || rank == 0) consumer.run<false, 64>();
    else consumer.run<false, FOURTH>();
  }
  cluster_barrier();  // no block leaves while others may signal its barriers
}
