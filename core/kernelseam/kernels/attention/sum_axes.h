// out = the sum of a float32 [n0, n1, n2, n3] over the axes along which out's stride is 0: what a broadcast bias takes.
//
// A block makes ELEMENTS of out, a warp each, whose lanes share what is summed; ALONE: a lane each, so that neighbouring lanes read
// side by side. In either a sum has a fixed order.
#include "generated/config.h"
#include "tile/tile.h"

typedef Config::OUT Out;

KS_KERNEL(WARP * Config::WARPS, 1)
sum_axes(const float* x, Out* out, i64 x0, i64 x1, i64 x2, i64 x3, i64 out0, i64 out1, i64 out2, i64 out3, i64 total,
         i64 summed, int kept0, int kept1, int kept2, int kept3, int n0, int n1, int n2, int n3) {
  const int m0 = n0 / kept0, m1 = n1 / kept1, m2 = n2 / kept2, m3 = n3 / kept3;  // extents of what is summed
  const int first = Config::ALONE ? warp_index() * WARP + lane() : warp_index();
  for (int e = first; e < Config::ELEMENTS; e += Config::WARPS * (Config::ALONE ? WARP : 1)) {
    const i64 index = (i64)block_index() * Config::ELEMENTS + e;
    if (index >= total) return;
    // kept: the extent of an axis of out; 1 along the others.
    const i64 i3 = index % kept3, i2 = index / kept3 % kept2, i1 = index / kept3 / kept2 % kept1,
              i0 = index / kept3 / kept2 / kept1;
    const float* const from = x + i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3;
    float sum = 0.f;
    if constexpr (Config::ALONE) {
      for (int j0 = 0; j0 < m0; j0++)
        for (int j1 = 0; j1 < m1; j1++)
          for (int j2 = 0; j2 < m2; j2++)
            for (int j3 = 0; j3 < m3; j3++) sum += from[j0 * x0 + j1 * x1 + j2 * x2 + j3 * x3];
    } else {
      for (i64 t = lane(); t < summed; t += WARP) {
        const i64 j3 = t % m3, j2 = t / m3 % m2, j1 = t / m3 / m2 % m1, j0 = t / m3 / m2 / m1;
        sum += from[j0 * x0 + j1 * x1 + j2 * x2 + j3 * x3];
      }
#pragma unroll
      for (int m = 1; m < WARP; m *= 2) sum += shuffle_xor(sum, m);
    }
    if (Config::ALONE || lane() == 0) out[i0 * out0 + i1 * out1 + i2 * out2 + i3 * out3] = convert<Out>(sum);
  }
}
