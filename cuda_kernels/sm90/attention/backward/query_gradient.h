// After the gradients: dq = scale · its sums, rounded and put where it belongs.
//
// One block of 128 threads 64 rows of a head: each warp takes fragments of 16 rows out of the sums, 512 bytes at a time, lays them
// as rows into shared memory, 64 · (QK_COLUMNS + 8) elements, and stores 16 bytes a thread. The last rows come first: their sums are in L2 still.
// It moves 4·QK_COLUMNS + 2·DQK bytes a row and runs at the speed of memory.
#include "sm90/attention/backward/sums.h"
#include "sm90/wgmma.h"

typedef Config::T T;
constexpr int ROWS = 64, ROW_THREADS = DQK <= 64 ? 8 : DQK <= 128 ? 16 : 32, AT_ONCE = 128 / ROW_THREADS;

KS_KERNEL(128, 1)
attention_backward_dq_sm90(const float* sums, Matrices<T> dq, Sequences sequences, SumBlocks blocks, float scale) {
  __shared__ __align__(16) u32 rows[ROWS][QK_COLUMNS / 2 + 4];
  earlier_kernels_wait();
  next_kernel_launch();
  constexpr int PARTS = STEP / ROWS;
  const int tiles = divide_up(sequences.S_q, ROWS), index = (int)(gridDim.x - 1 - block_index()), tile = index % tiles;
  const int head = index / tiles % blocks.num_heads, batch = index / tiles / blocks.num_heads;
  const Sequence s = sequences.at(batch);
  if (tile * ROWS >= s.S_q) return;
  const i64 block = blocks.first(batch, s.q_first) + (i64)head * blocks.head_blocks + tile / PARTS;
  const int warp = warp_index(), row = warp * 16 + lane() / 4;
  const float4* const from = (const float4*)(sums + block * (STEP * QK_COLUMNS) + tile % PARTS * ROWS * QK_COLUMNS) + lane();
#pragma unroll
  for (int c = 0; c < QK_COLUMNS / 8; c++) {
    const float4 x = from[c / 8 * (PIECE / 4) + warp * (4 * piece_columns(c / 8)) + c % 8 * 32];
    rows[row][c * 4 + lane() % 4] = pack2(x.x * scale, x.y * scale, T());
    rows[row + 8][c * 4 + lane() % 4] = pack2(x.z * scale, x.w * scale, T());
  }
  block_barrier();
  T* const to = dq.at<Config::Q_VIEW>(batch, head, blocks.num_heads, s.q_first);
  const int column = thread_index() % ROW_THREADS * 8;
#pragma unroll
  for (int i = 0; i < ROWS; i += AT_ONCE) {
    const int at = i + thread_index() / ROW_THREADS;
    if (tile * ROWS + at < s.S_q && column < DQK) *(uint4*)(to + (i64)(tile * ROWS + at) * dq.row + column) = *(const uint4*)&rows[at][column / 2];
  }
}
