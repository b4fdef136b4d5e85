// What consumers do with fragments of scores and of gradients, whichever products are theirs.
//
// Scores are transposed, keys × queries. A thread has two of its warp's 16 keys, lane/4 and lane/4 + 8, and of every 8 queries two,
// lane%4·2 on: element i is of key i/2 % 2 and query i/4·8 + lane%4·2 + i%2.
#pragma once
#include "sm90/attention/backward/tiles.h"
#include "sm90/attention/backward/dq_semaphore.h"
#include "sm90/attention/softmax.h"
#include "sm90/pipeline.h"

// The row of 16 that a lane addresses in stmatrix, in panels of 128-byte rows; `chunk`: the 16 bytes, of the swizzled row.
KS_DEVICE u32 matrix_row(int lane) { return lane % 16 * 128; }
KS_DEVICE u32 matrix_chunk(int chunk, int lane) { return ((chunk + lane / 16) ^ lane % 8) * 16; }

// Scores of hidden pairs of 64 keys from key0 on. ahead: as in some_hidden.
KS_DEVICE void mask_scores(float (&s)[STEP / 2], const Band& band, int ahead, int key0, int S_k, int warp, int lane) {
  const int mine = warp * 16 + lane / 4, key = key0 + mine, from = ahead - mine + lane % 4 * 2;
  int low[2], high[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    low[r] = Config::CAUSAL || Config::WINDOW ? 8 * r - band.reach() - from : -STEP;
    high[r] = Config::WINDOW ? 8 * r + band.left + 1 - from : STEP;
    if (key + 8 * r >= S_k) low[r] = STEP;
  }
#pragma unroll
  for (int i = 0; i < STEP / 2; i++) {
    const int query = i / 4 * 8 + i % 2, r = i / 2 % 2;
    if (query < low[r] || (Config::WINDOW && query >= high[r])) s[i] = hidden_score();
  }
}

// Whether who is first stores without a branch: 2 to 4 % of the time where it was measured the faster.
constexpr bool BRANCHLESS = PANELS == 1 || PANELS == 3;

// A warp's fragments of dq to the sums, where its lane's part of them begins; in order once its consumer may add, at this parity.
template<int N> KS_DEVICE void add_fragments(float* to, const float (&dq)[N], const DqSemaphores& semaphores, int group, u32 parity, int lane) {
  if (Config::IN_ORDER) barrier_wait(semaphores.of(group).full({0, 0}), parity);
  if (Config::IN_ORDER && BRANCHLESS) {
    const bool stores = semaphores.first(group);
#pragma unroll
    for (int i = 0; i < N / 4; i++) global_add_or_store(stores, to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  } else if (Config::IN_ORDER && semaphores.first(group)) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) global_store(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; i++) global_add(to + i * 128, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }
  if (Config::IN_ORDER) {
    warp_barrier();
    if (lane == 0) barrier_arrive(semaphores.of(group).empty({0, 0}));
  }
}

// Sets rows [from, ROWS) of a tile to zero: TMA has brought another sequence's. A consumer does so before it reads, over zeros that
// the other may have written. `barrier`: a named one of its own.
template<int ROWS, int COLUMNS> KS_DEVICE void zero_rows(char* tile, int from, int barrier, int warp, int lane) {
  const int thread = warp * WARP + lane;
#pragma unroll 1
  for (int i = max_of(from, 0) * 8 + thread; i < ROWS * 8; i += 128)
#pragma unroll
    for (int c = 0; c < (COLUMNS + 63) / 64; c++) *(uint4*)(tile + c * ROWS * 128 + i * 16) = uint4{0, 0, 0, 0};
  async_proxy_fence();
  named_barrier_sync(barrier, 128);
}

// A gradient of a warp's 16 keys, DIM of COLUMNS, times `by`: through rows of its own, from `first` on, of a tile of ROWS, to global memory, from
// `row` of the sequence on; L2 is for queries and sums. TMA does not write rows beyond a dense tensor's last; a packed sequence's last
// rows are stored by the threads, as the next sequence follows them.
template<class T, int ROWS, int DIM, int COLUMNS>
KS_DEVICE void store_gradient(const float (&x)[COLUMNS / 2], float by, char* tile, int first, int row, const WorkTile& w, const TensorMap& map,
                              const Matrices<T>& to, int lane) {
  const int count = Config::KV_VIEW == PACKED ? w.S_k - row : 16;
  each_step<DIM, 64>([&](int c) {
    char* const panel = tile + c / 64 * ROWS * 128 + first * 128;
    const int chunks = min_of(DIM - c, 64) / 8;
    const u32 line = shared_address(panel) + matrix_row(lane);
#pragma unroll
    for (int chunk = 0; chunk < chunks; chunk += 2) {
      const float* const y = x + c / 2 + chunk * 4;
      stmatrix(line + matrix_chunk(chunk, lane), pack2(y[0] * by, y[1] * by, T()), pack2(y[2] * by, y[3] * by, T()),
               pack2(y[4] * by, y[5] * by, T()), pack2(y[6] * by, y[7] * by, T()));
    }
    async_proxy_fence();
    warp_barrier();
    if (Config::KV_VIEW != PACKED || count >= 16) {
      if (lane == 0) tma_store(map, shared_address(panel), c, w.k_first + row, w.kv_head, Config::KV_VIEW == PACKED ? 0 : w.batch, evict_first());
    } else {
      T* const line_to = to.base + (i64)(w.k_first + row) * to.row + w.kv_head * to.head + c;
#pragma unroll 1
      for (int i = lane; i < count * chunks; i += WARP)
        *(uint4*)(line_to + (i64)(i / chunks) * to.row + i % chunks * 8) =
            *(const uint4*)(panel + i / chunks * 128 + (i % chunks ^ i / chunks % 8) * 16);
    }
  });
  if (lane == 0) tma_store_commit();
}
// Until the warp's stores have been read out of shared memory.
KS_DEVICE void stores_read(int lane) {
  if (lane == 0) tma_store_wait_read<0>();
  warp_barrier();
}
