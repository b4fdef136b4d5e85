// Batched GEMM for Hopper: C[i] = alpha · op(A[i]) · op(B[i]) + beta · C[i] + bias[i] + residual[i] of float32, multiplied by way of
// TF32 on wgmma, for every matrix of a strided batch or of lists of addresses, in one launch.
//
// Algorithm: persistent, BLOCKS blocks a multiprocessor. wgmma takes TF32 out of shared memory only where it lies along k, and
// one factor, the left, out of registers: op(A); or, where B is what does not lie along k, op(B)ᵀ, whose product with op(A)ᵀ is C
// turned. A producer thread fills a ring of STAGES slices (32 of k) of both by TMA, on from one tile to the next. GROUPS consumer
// warpgroups of 64 rows of the left factor read its fragments, multiply, and store their sums from registers, as pairs of
// neighbours in a row of C.
//
// PRODUCTS = 1: the TMA unit rounds to TF32 while it loads. 3: a factor x is a = tf32(x) and b = tf32(x − a). Consumers split the
// left in registers; the warps beside the producer's split the right in shared memory, b into a tile of its own. The units cut sums
// off where float32 rounds them, so the products of a slice are summed from 0, the small ones apart, and added outside. That
// goes by halves of the columns, so that one half is multiplied while the other is added.
//
// Shared memory: STAGES·(LEFT + PARTS·RIGHT)·128 bytes, barriers. Registers: RIGHT/2 accumulators, of three products twice as
// many; 32 of fragments, of three products 48.
#include "sm90/gemm/tf32_consumer.h"
#include "sm90/gemm/tf32_producer.h"

static_assert(registers_suffice(Config::LOADERS * Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS, Config::BLOCKS));

KS_KERNEL(THREADS, Config::BLOCKS)
gemm_sm90_tf32(KS_ARGUMENT TensorMap left_map, KS_ARGUMENT TensorMap right_map, const void* a, const void* b, void* c,
               const void* bias, const void* residual, const void* origin, i64 c_batch, i64 c_head, i64 bias_batch, i64 bias_head,
               i64 residual_batch, i64 residual_head, int c_row, int residual_row, int M, int N, int slices, int a_head_step,
               int a_batch_step, int b_head_step, int b_batch_step, float alpha, float beta, KS_ARGUMENT TileScheduler scheduler,
               KS_ARGUMENT FastDivmod b_heads) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const Arguments arguments{a, b, bias, residual, origin, c, c_batch, c_head, bias_batch, bias_head, residual_batch, residual_head,
                            c_row, residual_row, M, N, slices, a_head_step, a_batch_step, b_head_step, b_batch_step, alpha, beta};
  const Ring<STAGES> ring{shared_address(storage.ring)};
  const int index = warp_index(), group = index / 4, warp = index % 4, first = block_index(), step = gridDim.x;

  if (thread_index() == 0) {
    ring.init(4 * GROUPS);
    if (PRODUCTS == 3)
      for (int i = 0; i < STAGES; i++) barrier_init(shared_address(&storage.split[i]), SPLITTERS);
    barrier_init_fence();
  }
  block_barrier();

  if (group >= GROUPS) {
    if (Config::PRODUCER_REGISTERS) registers_dealloc<Config::PRODUCER_REGISTERS>();
    if (thread_index() == CONSUMERS) {
      Producer{storage, left_map, right_map, ring, arguments, scheduler, b_heads}.run(first, step);
    } else if (PRODUCTS == 3 && index > 4 * GROUPS) {
      Splitter{storage, ring, arguments, scheduler, index - 4 * GROUPS - 1}.run(first, step);
    }
    warp_barrier();
  } else {
    if (Config::CONSUMER_REGISTERS) registers_alloc<Config::CONSUMER_REGISTERS>();
    Consumer{storage, ring, arguments, scheduler, group, warp, lane()}.run(first, step);
  }
}
