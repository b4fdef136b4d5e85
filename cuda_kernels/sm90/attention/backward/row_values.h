// Before the gradients: for every query row delta = Σ dout·out, what the softmax's gradient subtracts (FlashAttention-2, §3.1.2),
// and −LSE in base 2; rows beyond a sequence's end get −inf, so that they have no weight. Besides, the semaphores are set to
// zero, and the sums of dq: in order only of queries that see no key, as who comes first to others stores (dq_semaphore.h).
//
// One block of 256 threads 64 rows of a head, a power of two of threads a row, 16 bytes each; nothing is shared. The last rows come first, so
// that dout of the first is in L2 when the gradients begin with them, and out, which nobody reads again, leaves it first. It moves 8·D + 8
// bytes a row, 4·D + 8 in order, and runs at the speed of memory.
#include "sm90/attention/backward/tiles.h"

typedef Config::T T;
constexpr int ROWS = 64, ROW_THREADS = DV <= 64 ? 8 : DV <= 128 ? 16 : 32, AT_ONCE = 256 / ROW_THREADS;

struct alignas(16) Eight { T x[8]; };

KS_DEVICE Eight last_load(const T* from) {
  union { uint4 words; Eight eight; } x{__ldcs((const uint4*)from)};
  return x.eight;
}

KS_KERNEL(256, 1)
attention_backward_rows_sm90(Matrices<const T> out, Matrices<const T> dout, RowValues<const float> lse, float* lse_base2, float* delta,
                             float* sums, unsigned* semaphores, Sequences sequences, SumBlocks blocks, int left, int right) {
  earlier_kernels_wait();
  next_kernel_launch();
  constexpr int PARTS = STEP / ROWS;
  const int tiles = blocks.query_blocks * PARTS, index = (int)(gridDim.x - 1 - block_index()), tile = index % tiles;
  const int head = index / tiles % blocks.num_heads, batch = index / tiles / blocks.num_heads;
  const Sequence s = sequences.at(batch);
  if (tile / PARTS * STEP >= s.S_q) return;
  const i64 block = blocks.first(batch, s.q_first) + (i64)head * blocks.head_blocks + tile / PARTS;
  const int row0 = tile % PARTS * ROWS;  // in the block
  if (!Config::IN_ORDER || Band{left, right}.unseen(tile / PARTS, s.S_k - s.S_q, s.S_k)) {
    Chunk<float>* const zeros = (Chunk<float>*)(sums + block * (STEP * QK_COLUMNS) + row0 * QK_COLUMNS);
#pragma unroll
    for (int i = 0; i < ROWS * QK_COLUMNS / 4 / 256; i++) zeros[i * 256 + thread_index()] = Chunk<float>{};
  }
  if (Config::IN_ORDER && row0 == 0 && thread_index() < PIECES) semaphores[block * PIECES + thread_index()] = 0;

  const T* const x = dout.at<Config::Q_VIEW>(batch, head, blocks.num_heads, s.q_first);
  const T* const y = out.at<Config::Q_VIEW>(batch, head, blocks.num_heads, s.q_first);
  const float* const logs = lse.base + (Config::Q_VIEW == PACKED ? s.q_first : batch * lse.batch) + head * lse.head;
  const int column = thread_index() % ROW_THREADS * 8;
#pragma unroll
  for (int i = 0; i < ROWS; i += AT_ONCE) {
    const int at = i + thread_index() / ROW_THREADS, row = tile * ROWS + at;
    float sum = 0.f;
    if (row < s.S_q && column < DV) {
      const Eight left = *(const Eight*)(x + (i64)row * dout.row + column), right = last_load(y + (i64)row * out.row + column);
#pragma unroll
      for (int e = 0; e < 8; e++) sum = fmaf(to_sum(left.x[e]), to_sum(right.x[e]), sum);
    }
#pragma unroll
    for (int m = 1; m < ROW_THREADS; m *= 2) sum += shuffle_xor(sum, m);
    if (column == 0) {
      const float log = row < s.S_q ? logs[row] : -infinity();
      delta[block * STEP + row0 + at] = sum;
      lse_base2[block * STEP + row0 + at] = log == -infinity() ? -infinity() : -LOG2_E * log;
    }
  }
}
