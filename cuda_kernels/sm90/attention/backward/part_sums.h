// After the gradients of parts of a group's heads: dk and dv = the sums of their parts, in float32 and in the order of the parts, rounded.
//
// A thread 8 columns of a row of dk or dv, 16 bytes of each part; the parts lie in the workspace, [entries, KV heads, parts, S_k, columns].
// It moves 2·(DQK + DV)·(parts + 1) bytes a row of keys, most of them in L2.
#include "sm90/attention/backward/sums.h"
#include "sm90/wgmma.h"

typedef Config::T T;
constexpr int K_CHUNKS = DQK / 8, CHUNKS = (DQK + DV) / 8;

KS_KERNEL(256, 1)
attention_backward_part_sums_sm90(const T* dk_parts, const T* dv_parts, Matrices<T> dk, Matrices<T> dv, int batch, int kv_heads, int head_parts,
                                  int S_k) {
  earlier_kernels_wait();
  next_kernel_launch();
  const i64 index = (i64)block_index() * 256 + thread_index(), row = index / CHUNKS;
  const int chunk = index % CHUNKS, matrix = row / S_k, at = row - (i64)matrix * S_k;
  if (matrix >= batch * kv_heads) return;
  const bool of_k = chunk < K_CHUNKS;
  const int columns = of_k ? DQK : DV, column = 8 * (of_k ? chunk : chunk - K_CHUNKS);
  const T* const from = (of_k ? dk_parts : dv_parts) + ((i64)matrix * head_parts * S_k + at) * columns + column;
  float sum[8] = {};
#pragma unroll 4
  for (int p = 0; p < head_parts; p++) {
    const Chunk<T> x = *(const Chunk<T>*)(from + (i64)p * S_k * columns);
#pragma unroll
    for (int e = 0; e < 8; e++) sum[e] += to_sum(x.v[e]);
  }
  Chunk<T> rounded;
#pragma unroll
  for (int e = 0; e < 8; e++) rounded.v[e] = convert<T>(sum[e]);
  const Matrices<T>& to = of_k ? dk : dv;
  *(Chunk<T>*)(to.at<STRIDED>(matrix / kv_heads, matrix % kv_heads, kv_heads, 0) + (i64)at * to.row + column) = rounded;
}
