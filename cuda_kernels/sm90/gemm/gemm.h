// Batched GEMM for Hopper: C[i] = alpha · op(A[i]) · op(B[i]) + beta · C[i] + bias[i] + residual[i] of 16 bits, summed in
// float32 and of 16 bits or float32; or of float32 that lies along K, multiplied as TF32, to which TMA rounds it; or of e4m3 that
// lies along K, with or without scales of its rows and columns, or of blocks of them along K: for every matrix of a strided batch or of lists of addresses, in
// one launch.
//
// Algorithm: persistent, BLOCKS blocks a multiprocessor, or clusters of CLUSTER blocks, whose tiles are neighbours along M
// and which multicast B to each other, or along N and multicast A (SHARED_A). A producer thread fills a ring of STAGES slices (128 bytes
// of K) of A and B by TMA, on from one tile of C to the next; source tiles (C, residual) of the epilogue come through the same ring. GROUPS consumer warpgroups
// multiply by wgmma, BM/GROUPS rows each, and store their rows (epilogue.h). In PING_PONG two consumers have every other tile each, and
// take turns: one applies its epilogue and stores while the other multiplies.
// What becomes of the sums before they are rounded may be any expression of them (expression.h), also of pairs of columns: where the two are
// halves of N, each half's columns are half of a tile's. Sums and maxima of them leave as parts (reductions.h),
// which a second launch adds up, or this one (joined_parts.h).
// Sums of several products (SUMMED: batches, heads) follow one another through the ring. A's heads may be those of three
// operands (SEGMENTED), with a map each. Heads whose elements follow one another along an axis are one product (JOINED):
// a box is then found by its head. Sums of A's rows (ROW_SUMS) are products with a column of ones, in the tiles of column 0.
// Few tiles: a cluster of SPLIT blocks has one tile, each block a part of K. The others' sums come to the first through stages
// of its ring that no source tile needs, and it adds them, always in that order.
// Grouped products (GROUPED, groups.h) are divided along M or K by offsets in device memory. A tile at the end of a group has rows
// of the next, which warps that store do not store, nor the TMA unit, whose boxes are whole or left to the warps; along K a group's
// last slice is cleared behind the group's end before it is multiplied.
// Tiles of a last wave that is not full are cut along K (TAIL_SLICES, last_wave.h).
// Lists of products (list_maps.h) have sizes, strides and tensor maps of their own for each group.
// Rows of A may be gathered (gather.h), rows of C scattered and multiplied by factors: then warps store them.
// Results go to a matrix (result.h), or to the heads of q, k and v, rotated or not, in strided memory or pages (heads.h).
// Lists: a tensor map that begins at any address, the origin, reaches a matrix wherever it lies, by two axes, of which one
// counts 16 bytes.
//
// Shared memory: STAGES·(BM + BN)·128 bytes, GROUPS·BUFFERS·8 KB, STAGES·(BM + 4)·4 of scales of blocks, the bias, 1 KB of ones where
// rows are summed, barriers.
// Registers: BM·BN/(128·GROUPS) accumulators, of e4m3 twice (consumer.h), 4 for each 64 rows whose elements are summed.
#include "sm90/gemm/consumer.h"
#include "sm90/gemm/gather.h"
#include "sm90/gemm/producer.h"
#include "sm90/gemm/scale_loader.h"

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS, Config::BLOCKS));

KS_BODY(THREADS, Config::BLOCKS)
gemm_sm90_body(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& c_map,
          const TensorMap& residual_map, const void* a, const void* b, void* c, const void* bias, const void* residual,
          const void* origin, i64 c_batch, i64 c_head, i64 bias_batch, i64 bias_head, int c_row, int M, int N, int slices,
          int a_head_step, int a_batch_step, int b_head_step, int b_batch_step, int residual_head_step,
          int residual_batch_step, float alpha, float beta, const TileScheduler& order, const FastDivmod& b_heads,
          void* sums, i64 sums_batch, i64 sums_head, int batch_group, int head_group, const Groups& groups,
          const TensorMap& a1_map, const TensorMap& a2_map, int a1_first, int a2_first, const FastDivmod& joined_heads,
          const TensorMap& c1_map, const TensorMap& c2_map, const Result& result, const RowIndices& indices,
          const GatheredRows& gathered, const Scales& scales,
          const EpilogueArguments& epilogue, const TensorMap& sums_map, const EpilogueParts<Config::REDUCTIONS>& parts,
          const ReducedNumbers<Config::REDUCTIONS>& reduced) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& storage = *(SharedStorage*)memory;
  const TensorMap &a1 = one_of<Config::SEGMENTED>(a1_map, a_map), &a2 = one_of<Config::SEGMENTED>(a2_map, a_map);
  const TensorMap &c1 = one_of<Config::HEADS>(c1_map, c_map), &c2 = one_of<Config::HEADS>(c2_map, c_map);
  const FastDivmod& joined = one_of<Config::JOINED != 0>(joined_heads, b_heads);
  const Maps maps{a_map, b_map, c_map, residual_map, a1, a2, c1, c2, one_of<Config::PREACTIVATION>(sums_map, c_map)};
  const Arguments arguments{a, b, bias, residual, origin, c, c_batch, c_head, bias_batch, bias_head, c_row, M, N, slices,
                            a_head_step, a_batch_step, b_head_step, b_batch_step, residual_head_step, residual_batch_step,
                            alpha, beta, sums, sums_batch, sums_head, batch_group, head_group, a1_first, a2_first, scales, b_heads, indices,
                            epilogue, parts, reduced};
  const Ring<STAGES> ring{shared_address(storage.ring)};
  const int group = warp_index() / 4, warp = warp_index() % 4, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int split_rank = SPLIT > 1 ? cluster_rank() : 0;
  const int step = gridDim.x / (CLUSTER * SPLIT);
  const int number = Config::SCALE_K ? 0 : block_index() / (CLUSTER * SPLIT);
  auto first = [&] {
    if constexpr (!Config::SCALE_K) return number;
    int block;  // read by each role: kept from here on it would be spilled
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block / (CLUSTER * SPLIT);
  };

  if (thread_index() == CONSUMERS) {
    tensor_map_prefetch(a_map), tensor_map_prefetch(b_map);
    if (Config::STORE == TMA) tensor_map_prefetch(c_map);
  }
  if (thread_index() == 0) {
    ring.init(SHARERS * CLUSTER * RELEASES, FULL_ARRIVALS);
    for (int g = 0; g < GROUPS; g++) Ring<SLOTS>{shared_address(storage.out_ring[g])}.init(1, 4);
    barrier_init_fence();
  }
  if constexpr (RowSums::THERE) {
    for (int i = thread_index(); i < 256; i += THREADS) storage.ones()[i] = pack2(1.f, 1.f, Half());
    async_proxy_fence();
  }
  if (CLUSTER > 1) cluster_barrier();
  else block_barrier();
  earlier_kernels_wait();
  next_kernel_launch();
  if constexpr (HAS_TABLE) make_table<THREADS>(groups_of(storage), groups);
  auto scheduler = [&]() -> decltype(auto) {
    if constexpr (Config::GROUPED) return GroupScheduler(order, groups, groups_of(storage), step, number, slices);  // of each role its own, as `first`
    else if constexpr (TAIL) return TailScheduler(order, step, number, slices);
    else return (order);
  };

  if (group == GROUPS) {
    if (Config::PRODUCER_REGISTERS) registers_dealloc<Config::PRODUCER_REGISTERS>();
    // SplitSums' barriers: of all warps, whose stores wait for what comes after them, and whose loads for what comes before.
    if (SPLIT > 1 && warp > 0) cluster_barrier(), cluster_barrier();
    if constexpr (Config::GATHERED) {
      GatheringProducer{storage, maps, ring, arguments, scheduler(), gathered, (int)thread_index() - CONSUMERS}.run(first(), step);
    } else if (thread_index() == CONSUMERS) {
      Producer{storage, maps, ring, arguments, scheduler(), b_heads, joined, result, rank, split_rank}.run(first(), step);
    } else if (Config::STORE == TMA && split_rank == 0 && warp >= 1 && warp <= GROUPS && lane() == 0) {
      const Ring<SLOTS> out_ring{shared_address(storage.out_ring[warp - 1])};
      EpilogueStore{storage, maps, out_ring, arguments, scheduler(), result, rank, warp - 1}.run(first(), step);
    }
    if constexpr (Config::SCALE_K != 0)
      if (warp == 3) ScaleLoader{storage, ring, arguments, scheduler(), rank, lane()}.run(first(), step);
    warp_barrier();
    if (SPLIT > 1 && warp == 0) cluster_barrier(), cluster_barrier();
  } else {
    if (Config::CONSUMER_REGISTERS) registers_alloc<Config::CONSUMER_REGISTERS>();
    const Ring<SLOTS> out_ring{shared_address(storage.out_ring[group])};
    Consumer{storage, ring, out_ring, arguments, scheduler(), result, rank, split_rank, group, warp, lane()}.run(first(), step);
  }
  if (CLUSTER > 1) cluster_barrier();  // no block leaves while others may signal its barriers
}
