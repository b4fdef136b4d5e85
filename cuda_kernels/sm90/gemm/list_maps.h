// The tensor maps of a list of products (GROUPED is BY_LIST): of each group A's, B's and C's, from one of the box, the swizzle and the
// dtype that all of a list share, in which addresses, extents and row strides are replaced. So lists may lie on the device, be captured in
// a graph, and change from launch to launch. The product that follows acquires what it reads of them (groups.h).
//
// A warp makes the maps of a group, in shared memory, where they can be replaced: 384 bytes a warp. Registers: few.
#include "gemm/groups.h"
#include "sm90/ptx.h"

constexpr int WARPS = 4, MAPS = 3;

// A map in shared memory: where its tensor is, the extents of its two first axes, and bytes from one row to the next.
KS_DEVICE void tensor_map_replace(TensorMap& map, const void* address, int columns, int rows, i64 row_bytes) {
  const u32 at = shared_address(&map);
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" :: "r"(at), "l"(address) : "memory");
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" :: "r"(at), "r"(columns) : "memory");
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" :: "r"(at), "r"(rows) : "memory");
  asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" :: "r"(at), "l"(row_bytes) : "memory");
}
// Copies a map from shared to global memory, for those who acquire it there. All lanes call it.
KS_DEVICE void tensor_map_release(TensorMap* to, const TensorMap& map) {
  asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
               :: "l"(to), "r"(shared_address(&map)) : "memory");
}

KS_BODY(WARP * WARPS, 1)
gemm_list_maps_sm90_body(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& c_map, const void* a, const void* b, const void* c,
                    void* maps, const Groups& groups) {
  __shared__ alignas(128) TensorMap own[WARPS][MAPS];
  const int g = block_index() * WARPS + warp_index(), i = lane();
  TensorMap* const made = own[warp_index()];
  earlier_kernels_wait();
  next_kernel_launch();
  if (g >= groups.count) return;
  if (i < 16) made[0].opaque[i] = a_map.opaque[i], made[1].opaque[i] = b_map.opaque[i], made[2].opaque[i] = c_map.opaque[i];
  warp_barrier();
  if (i < MAPS) {
    const int M = groups.of_list(g, OF_M), N = groups.of_list(g, OF_N), K = groups.of_list(g, OF_K);
    const bool of_a = i == 0, of_b = i == 1, transposed = of_a ? Config::A_TRANSPOSED : of_b && Config::B_TRANSPOSED;
    const int rows = of_b ? K : M, columns = of_a ? K : N;
    const void* const at = of_a ? listed((const char*)a, g) : of_b ? listed((const char*)b, g) : listed((const char*)c, g);
    const int size = i < 2 ? sizeof(Config::T) : sizeof(Config::TC);
    // of a group without elements the map is not used, but must be one
    // a single row's stride may be none of TMA's, which are multiples of 16 bytes
    tensor_map_replace(made[i], at, max_of(transposed ? rows : columns, 1), max_of(transposed ? columns : rows, 1),
                       ((i64)groups.of_list(g, ROW_OF_A + i) * size + 15) / 16 * 16);
  }
  warp_barrier();
#pragma unroll
  for (int n = 0; n < MAPS; n++) tensor_map_release((TensorMap*)maps + MAPS * g + n, made[n]);
}
