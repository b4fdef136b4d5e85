// Hopper's instructions by name: mbarriers, the tensor memory accelerator (TMA), named barriers, reallocation of
// registers among warpgroups. One function an instruction; the PTX ISA defines them. Shared addresses are 32 bits.
#pragma once
#include "tile/tile.h"

typedef unsigned u32;

// ---- mbarriers: a phase ends with its last arrival and the last byte that was announced. A phase is known by its parity:
// waiting for the one before the first, parity 1 of a new barrier, does not wait.

KS_DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// After all mbarriers are initialised, before the block's first barrier.
KS_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KS_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrive, and add the bytes that a copy will write to the expected transaction count.
KS_DEVICE void barrier_arrive_expect_tx(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Bytes that the barrier's phase waits for, too; an arrival of the same thread's comes behind.
KS_DEVICE void barrier_expect_tx(u32 barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
KS_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain_%=:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again_%=;\n}" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- clusters: blocks that run at once and reach each other's shared memory

KS_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks: after mbarriers are initialised, and before a block exits, whose memory others access until then.
KS_DEVICE void cluster_barrier() {
  warp_barrier();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrive at the barrier at the same place of another block of the cluster. Without .release, which would order all of a
// thread's writes, by a fence of the whole GPU: what arrivals order here are reads by products that were waited for.
KS_DEVICE void barrier_arrive_at(u32 barrier, int rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" :: "r"(barrier), "r"(rank) : "memory");
}

// Writes 16 bytes at the same place of another block's shared memory; a cluster_barrier makes them visible there.
KS_DEVICE void store_at(u32 to, int rank, float x, float y, float z, float w) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n}"
               :: "r"(to), "r"(rank), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Reads 4, or 16, bytes at the same place of another block's shared memory.
KS_DEVICE float load_at(u32 from, int rank) {
  float x;
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
               : "=f"(x) : "r"(from), "r"(rank) : "memory");
  return x;
}
KS_DEVICE void load_four_at(u32 from, int rank, float (&x)[4]) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from), "r"(rank) : "memory");
}

// Writes 16 bytes to shared memory.
KS_DEVICE void store_four(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
// Writes 16 bytes of zeros to shared memory.
KS_DEVICE void store_zeros(u32 to) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(to), "r"(0) : "memory"); }

// Writes 4 bytes at the same place of another block's shared memory; counts them at that block's `barrier`.
KS_DEVICE void store_async(u32 to, int x, u32 barrier, int rank) {
  asm volatile("{\n.reg .b32 there, signal;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 signal, %2, %3;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [signal];\n}"
               :: "r"(to), "r"(x), "r"(barrier), "r"(rank) : "memory");
}
// Copies `bytes`, a multiple of 16, to another block's shared memory; counts them at that block's `barrier`.
KS_DEVICE void bulk_copy_to(u32 to, u32 from, int bytes, u32 barrier, int rank) {
  asm volatile("{\n.reg .b32 there, signal;\nmapa.shared::cluster.u32 there, %0, %4;\nmapa.shared::cluster.u32 signal, %3, %4;\n"
               "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [signal];\n}"
               :: "r"(to), "r"(from), "r"(bytes), "r"(barrier), "r"(rank) : "memory");
}

KS_DEVICE float load_float(u32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
KS_DEVICE void load_four(u32 from, float (&x)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(from) : "memory");
}

// ---- named barriers 1 to 15 of some of a block's warps, `threads` threads in all

KS_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// The same for warps that meet from different places of the code, which .aligned does not allow.
KS_DEVICE void named_barrier_meet(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
KS_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
// The OR of x over the threads.
KS_DEVICE bool named_barrier_any(int id, int threads, bool x) {
  int any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(any) : "r"(id), "r"(threads), "r"((int)x) : "memory");
  return any;
}

// ---- registers of a warpgroup's threads (setmaxnreg). registers_alloc blocks until other warps have deallocated enough: of what the block was
// launched with, not of all that there are.

constexpr int launched_registers(int threads, int blocks = 1) { return 65536 / (threads * blocks) / 8 * 8; }
// Whether a block of so many threads, `blocks` of which a multiprocessor has, may give its warpgroups `sum` registers a thread. If not it waits for ever.
constexpr bool registers_suffice(int sum, int threads, int blocks = 1) { return sum <= threads / 128 * launched_registers(threads, blocks); }
template<int N> KS_DEVICE void registers_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template<int N> KS_DEVICE void registers_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }

// Whether this thread is the one of its warp that is chosen, always the same one; the compiler knows that it is one.
KS_DEVICE bool elected() {
  int x;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(x) :: "memory");
  return x;
}

// ---- TMA: tiles of a tensor that a map describes, by coordinates, the contiguous axis first

struct alignas(64) TensorMap { u64 opaque[16]; };

KS_DEVICE void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// What TMA reads of the map from here on is what was released.
KS_DEVICE void tensor_map_acquire(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}

// Elements outside the tensor are filled with zeros; their bytes count as transferred.
KS_DEVICE void tma_load(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
// Of a map with five axes.
KS_DEVICE void tma_load_5d(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
}
// The same with a policy for the L2 cache.
KS_DEVICE void tma_load(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(policy) : "memory");
}
// To the same shared address in every block of the cluster whose bit is set in `blocks`; signals that block's own mbarrier.
KS_DEVICE void tma_load_multicast(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "h"((unsigned short)blocks) : "memory");
}
// The same with a policy for the L2 cache.
KS_DEVICE void tma_load_multicast(u32 to, const TensorMap& map, u32 barrier, int x0, int x1, int x2, int x3, int blocks,
                                  u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;"
      :: "r"(to), "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "h"((unsigned short)blocks), "l"(policy)
      : "memory");
}
// Elements outside the tensor are not written.
KS_DEVICE void tma_store(const TensorMap& map, u32 from, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(from), "r"(x0), "r"(x1), "r"(x2), "r"(x3) : "memory");
}
// The same with a policy for the L2 cache.
KS_DEVICE void tma_store(const TensorMap& map, u32 from, int x0, int x1, int x2, int x3, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
               :: "l"(&map), "r"(from), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(policy) : "memory");
}
KS_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but N groups of this thread's stores have been read out of shared memory.
template<int N> KS_DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }
template<int N> KS_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory"); }
// Orders this thread's generic-proxy accesses to shared memory before those by TMA or wgmma (the async proxy): its stores before
// their reads, its reads before their writes.
KS_DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk copies of contiguous bytes, multiples of 16

KS_DEVICE void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same with a policy for the L2 cache.
KS_DEVICE void bulk_load(u32 to, const void* from, int bytes, u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// ---- copies of 16 bytes by a thread (cp.async), zeros where there is nothing to copy

KS_DEVICE void async_copy_bytes(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
KS_DEVICE void async_copy(u32 to, const void* from, bool there, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0), "l"(policy) : "memory");
}
KS_DEVICE void async_copy(u32 to, const void* from, bool there) { async_copy_bytes(to, from, there ? 16 : 0); }
KS_DEVICE void async_copy_word(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
// Arrives at the barrier when this thread's copies so far have ended; the barrier counts on it.
KS_DEVICE void async_copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
KS_DEVICE void async_copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// An L2 cache policy: these lines are evicted first. Naming the normal policy differs from naming none: GEMMs with few columns
// took 8 % longer.
KS_DEVICE u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The same of three lines in four; the others' policy is the normal one.
KS_DEVICE u64 mostly_evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 0.75;" : "=l"(policy));
  return policy;
}

// ---- fragments to shared memory and back: four 8×8 matrices of 16-bit elements, lane l gives the address of row l % 8 of
// matrix l / 8

KS_DEVICE void stmatrix(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same of each matrix' transpose.
KS_DEVICE void stmatrix_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

KS_DEVICE void ldmatrix(u32 from, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// The same, each matrix transposed: lane l has of column l / 4 the rows l % 4 · 2 and the next.
KS_DEVICE void ldmatrix_transposed(u32 from, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// What lane `from` has of x; every lane must ask.
KS_DEVICE int shuffle(int x, int from) {
  int y;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(y) : "r"(x), "r"(from));
  return y;
}

// x, which every lane has, known to the compiler as one value: in a uniform register, where descriptors are made of it by one
// addition. Else each product waits for its own way there.
// The value of the lane `by` before this one; of the first lanes their own.
template<class X> KS_DEVICE X shuffle_up(X x, int by) { return __shfl_up_sync(~0u, x, by); }
template<class X> KS_DEVICE X uniform(X x) { return __shfl_sync(~0u, x, 0); }
// Of a ballot over 32 neighbouring columns of a product, the bits of those that a lane has: two of eight.
KS_DEVICE u32 own_columns(u32 x) {
  x = x >> lane() % 4 * 2 & 0x03030303u;
  x = (x | x >> 6) & 0x000f000fu;
  return (x | x >> 12) & 0xffu;
}
// Whether all of a warp's x and y have the same second member, which is as long as the first, or 8 bytes.
template<class X> KS_DEVICE bool are_alike(const X& x, const X& y) {
  constexpr int WORDS = divide_up((int)sizeof(X), 4);
  union Words { X x; u32 words[WORDS]; } a{x}, b{y};
  bool alike = true;
#pragma unroll
  for (int i = divide_up(WORDS, 2); i < WORDS; i++) {
    const u32 word = __shfl_sync(~0u, a.words[i], 0);
    alike = alike && a.words[i] == word && b.words[i] == word;
  }
  return __ballot_sync(~0u, !alike) == 0;
}

// 16 bytes of fragments, from one warp to another as they lie.
KS_DEVICE void store_fragment(u32 to, const u32 (&x)[4]) {
  asm volatile("st.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
KS_DEVICE void load_fragment(u32 from, u32 (&x)[4]) {
  asm volatile("ld.shared::cta.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

struct Pair { float x, y; };
KS_DEVICE void store_pair(u32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(x), "f"(y) : "memory");
}

KS_DEVICE Pair load_pair(u32 from) {
  Pair x;
  asm volatile("ld.shared::cta.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// ---- plain memory, by hand where the compiler has no word for it

// Adds four neighbours in global memory at once, as one reduction in L2.
KS_DEVICE void global_add(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// The same, or stores them, without a branch.
KS_DEVICE void global_add_or_store(bool stores, float* to, float a, float b, float c, float d) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n"
               "@!p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"((int)stores) : "memory");
}
KS_DEVICE void global_store(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// From L2, whatever is in this multiprocessor's cache.
KS_DEVICE u32 load_relaxed(const u32* from) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
KS_DEVICE void store_relaxed(u32* to, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(x) : "memory"); }
// And all that was released before it.
KS_DEVICE u32 load_acquire(const u32* from) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
// Four floats, from L2.
KS_DEVICE void global_load(const float* from, float (&x)[4]) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(from) : "memory");
}
// What this thread wrote before, and what it knows that others have, is there for who reads the sum.
KS_DEVICE void add_release(u32* to, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(to), "r"(x) : "memory");
}

// ---- optimisation barriers

// All values are in registers at this point; the compiler moves no computation of them past it.
template<int N> KS_DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}
// f(I), f(I + STEP), … below END, each a constant. Instead of a loop that has a barrier: such a loop is unrolled late, and until then an array that
// it indexes is memory to the compiler, which takes half as long again.
template<int I> struct int_constant { KS_DEVICE constexpr operator int() const { return I; } };
template<int END, int STEP, int I = 0, class F> KS_DEVICE void each_step(const F& f) {
  if constexpr (I < END) {
    f(int_constant<I>());
    each_step<END, STEP, I + STEP>(f);
  }
}
// nvrtc 13.5 keeps a register or two more than 13.0 where none is left, and would spill. What spares them there costs half a percent
// with 13.0, which needs none of it.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1305
constexpr bool RECOMPUTES_ADDRESSES = true;
#else
constexpr bool RECOMPUTES_ADDRESSES = false;
#endif
// Returns x, whose value is hidden from the compiler: addresses that depend on it are computed here and no earlier.
KS_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
