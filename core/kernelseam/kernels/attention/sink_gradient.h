// What an attention sink takes: dsinks[h] = −Σ e^(sink_h − lse)·delta over all rows of head h (row_delta.h).
//
// One block a head; its threads share the rows, then add up in a fixed order.
#include "generated/config.h"
#include "tile/tile.h"

KS_KERNEL(WARP * Config::WARPS, 1)
sink_gradient(const float* sinks, const float* lse, const float* delta, float* dsinks, const int* offsets, i64 lse_batch,
              i64 lse_head, i64 delta_batch, i64 delta_head, int batch, int rows, int sequences) {
  float* const shares = (float*)shared_memory<Config::WARPS * 16>();
  const int head = block_index(), warp = warp_index();
  const int first = Config::PACKED ? offsets[0] : 0, end = Config::PACKED ? offsets[sequences] : rows;
  const float sink = sinks[head];
  float sum = 0.f;
  for (int b = 0; b < batch; b++)
    for (int i = first + thread_index(); i < end; i += WARP * Config::WARPS) {
      const float s = lse[b * lse_batch + head * lse_head + i];
      // At most a whole: an LSE of a sink near the largest number was clamped.
      const float share = 1.44269504f * (sink - s);
      if (s != -infinity()) sum -= exp2_fast(share > 0.f ? 0.f : share) * delta[b * delta_batch + head * delta_head + i];
    }
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) sum += shuffle_xor(sum, m);
  if (lane() == 0) shares[warp] = sum;
  block_barrier();
  if (thread_index() == 0) {
    float total = 0.f;
    for (int w = 0; w < Config::WARPS; w++) total += shares[w];
    dsinks[head] = total;
  }
}
