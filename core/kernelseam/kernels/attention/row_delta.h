// For every query row of an attention: delta = Σ_d dout·out, what the softmax's gradient subtracts (FlashAttention-2, §3.1.2).
//
// One warp a row, its lanes over the columns. Nothing is shared between warps. Besides, they zero memory that the launches
// after this one add to: `zero_chunks` times 16 bytes.
#include "generated/config.h"
#include "tile/tile.h"

typedef Config::T T;

KS_KERNEL(WARP * Config::WARPS, 1)
row_delta(const T* dout, const T* out, float* delta, float* zeros, const int* offsets, i64 dout_batch, i64 dout_head, i64 out_batch,
         i64 out_head, i64 delta_batch, i64 delta_head, i64 zero_chunks, int dout_row, int out_row, int num_heads, int rows,
         int total, int sequences) {
  const i64 index = (i64)block_index() * Config::WARPS + warp_index();
  if (index >= total) return;
  for (i64 i = index * WARP + lane(); i < zero_chunks; i += (i64)total * WARP) ((Chunk<float>*)zeros)[i] = Chunk<float>{};
  const int line = (int)index, row = line % rows, head = line / rows % num_heads, batch = line / rows / num_heads;
  if (Config::PACKED && (row < offsets[0] || row >= offsets[sequences])) return;
  const T* const x = dout + batch * dout_batch + head * dout_head + (i64)row * dout_row;
  const T* const y = out + batch * out_batch + head * out_head + (i64)row * out_row;
  float sum = 0.f;
  for (int d = lane(); d < Config::DV; d += WARP) sum += to_sum(x[d]) * to_sum(y[d]);
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) sum += shuffle_xor(sum, m);
  if (lane() == 0) delta[batch * delta_batch + head * delta_head + row] = sum;
}
