// Attention's gradients for Hopper: dk and dv, and float32 sums of dq, in one launch between two small ones.
//
// With p = 2^(x − lse₂), x the scores in base 2 (scores.h), and delta = Σ dout·out of every row (row_values.h):
//   dp = dout·vᵀ,  ds = p·(dp − delta) (times 1 − tanh² under a softcap),
//   dv = pᵀ·dout,  dk = scale·dsᵀ·q,  dq = scale·ds·k (query_gradient.h has the scale and the rounding).
//
// Algorithm: FlashAttention-2's (Dao 2023, arXiv:2307.08691) by warpgroups. A block is one producer warpgroup and two consumers.
// It owns KEYS keys, each consumer 64 of them, and walks over the queries of its KV head's group, STEP at a time. Scores are
// transposed, keys × queries: so pᵀ and dsᵀ are register operands of dv and dk, which stay in registers for the whole tile. Only
// ds goes through shared memory: dq of a step sums over all keys of the block, and each consumer multiplies a piece of it, 64 rows and
// up to 64 columns, one step late, so that consumers meet nowhere else. What a consumer issues in step i, and what its warps do meanwhile:
//   dp(i) dv(i)              ds(i), once dp is there
//   dq(i−1) s(i+1) dk(i)     add dq, once it is there, then p(i+1), once s is there
// K and V come by TMA once a tile, K while the gradients of the last one are stored, through V; q and dout by rings of STAGES and
// O_STAGES. The grid is persistent: one block a
// multiprocessor.
//
// The pieces of dq are added in L2, as fragments lie: a warp's part is contiguous. In any order, that is all. In order
// (IN_ORDER) a semaphore orders the tiles that add to the same piece; threads beside the loading one wait for it: dq_semaphore.h. Tiles are
// taken in that order, so a tile that is waited for has begun; STAGGERED all of a section run. Extra memory: sums.h.
//
// Biases, masks in memory, ALiBi and score_mods are computed by element, in place of a step's products: elements.h. What a bias takes is
// made by a launch of its own: score_gradient.h. Under a mask_mod a tile walks over a list of blocks of queries (query_lists.h), whose scores
// are masked where some pair is hidden: the loading thread leaves a step's block and head beside its row values, and the thread that waits
// for the sums of dq says whose they are.
//
// p is rounded to 16 bits before ds is made of it: 16 registers fewer. Rows beyond a sequence's end are set to zero where other
// data may lie there, so that no NaN of theirs counts.
//
// Bytes of shared memory that a step of D = 128 reads and writes: 320 KB, 2500 clocks, beside 2560 of products; additions to dq,
// 64·D·4 a step, cost 10 to 15 % there, 5 % at D = 64 (H200).
//
// Shared memory, bytes, D the head dim, of queries and keys as of values, in whole panels of 64 columns: 512·D·KV_STAGES of K and V,
// 2·STEP·D·(STAGES + O_STAGES) of q and dout, 512·STEP of ds (two steps'), 4·STEP·(STAGES + O_STAGES) of row values, 1 K.
// Registers of a consumer's thread: D of dk and dv, STEP/2 of s (later dq), STEP/2 of dp, STEP/4 of p, STEP/4 of ds, STEP/4 of lse or delta where
// they are loaded ahead, and about 20.
#include "sm90/attention/backward/consumer.h"
#include "sm90/attention/backward/producer.h"

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS));

KS_KERNEL(THREADS, 1)
attention_backward_sm90(KS_ARGUMENT TensorMap q_map, KS_ARGUMENT TensorMap dout_map, KS_ARGUMENT TensorMap k_map,
                        KS_ARGUMENT TensorMap v_map, KS_ARGUMENT TensorMap dk_map, KS_ARGUMENT TensorMap dv_map,
                        KS_ARGUMENT Operands operands, KS_ARGUMENT Sequences sequences, KS_ARGUMENT TileCount count,
                        KS_ARGUMENT ScoreArguments score, float scale) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const Maps maps{q_map, dout_map, k_map, v_map, dk_map, dv_map};
  const Rings rings{{shared_address(storage.k_ring)}, {shared_address(storage.v_ring)}, {shared_address(storage.q_ring)}, {shared_address(storage.dout_ring)},
                    {shared_address(storage.ds_ring)}, {shared_address(storage.semaphores)}};
  const Band band{score.left, score.right, score.prefixes};

  if (thread_index() == 0) {
    rings.k.init(CONSUMERS / WARP + GROUPS * Config::IN_ORDER);
    rings.v.init(CONSUMERS / WARP);
    rings.q.init(CONSUMERS / WARP);
    rings.dout.init(CONSUMERS / WARP);
    rings.ds.init(CONSUMERS / WARP, CONSUMERS / WARP);
    for (int i = 0; i < GROUPS; i++) rings.semaphores.of(i).init(CONSUMERS / WARP / GROUPS);
    barrier_init_fence();
  }
  block_barrier();

  next_kernel_launch();
  const int group = warp_index() / 4, warp = warp_index() % 4;
  if (group == GROUPS) {
    if (warp > 0) earlier_kernels_wait();  // for semaphores; the producer waits for row values
    registers_dealloc<Config::PRODUCER_REGISTERS>();
    if (thread_index() == CONSUMERS) Producer{storage, maps, rings, operands, {count, sequences, band, storage.walk}}.run();
    if (Config::IN_ORDER && warp > 0 && warp <= GROUPS && lane() == 0)
      DqSemaphore<KEYS, KV_STAGES>{storage.work_tiles, rings.k, rings.semaphores.of(warp - 1), count, band,
                                   storage.semaphores[warp - 1].first, storage.semaphores[warp - 1].block,
                                   operands.semaphores + warp - 1}.run();
  } else {
    registers_alloc<Config::CONSUMER_REGISTERS>();
    const Consumer consumer{storage, maps, rings, operands, sequences, count, score, band, scale, group, warp, lane()};
    constexpr int FIRST = piece_columns(0), SECOND = piece_columns(PANELS - 1);
    if (FIRST == SECOND || group == 0) consumer.run<FIRST>();
    else consumer.run<SECOND>();
  }
}
