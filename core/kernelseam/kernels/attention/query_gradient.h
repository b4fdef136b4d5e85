// dq = scale · the sums that backward.h left of it, rounded and put where it belongs.
//
// One block a tile of STEP queries, each of its warps with the part that a warp of backward.h computed.
#include "attention/query_sums.h"

typedef Config::T T;
typedef Engine<T, T, Config::PRECISION> E;

KS_KERNEL(WARP * WARPS, 1)
query_gradient(const float* sums, T* dq, const int* offsets, i64 dq_batch, i64 dq_head, int dq_row, int num_heads, int S_q,
               int tiles, float scale) {
  typedef PlainTile<T, QUERY_ROWS, QUERY_COLUMNS> Staged;
  char* const memory = shared_memory<WARPS * Staged::BYTES>();
  const int index = (int)block_index(), tile = index % tiles, head = index / tiles % num_heads, batch = index / tiles / num_heads;
  const int first = Config::PACKED ? offsets[batch] : 0, rows = Config::PACKED ? offsets[batch + 1] - first : S_q;
  if (tile * STEP >= rows) return;
  E::Acc<QUERY_ROWS, QUERY_COLUMNS> x;
  E::load(x, warp_sums<Config::PACKED>(sums, batch, first, tiles, num_heads) + sums_offset(tile, head, num_heads));
  E::map(x, [=](int, int, float y) { return y * scale; });
  const Staged staged(memory + warp_index() * Staged::BYTES);
  E::to_shared(staged, x);
  warp_barrier();
  const StridedView<T> to{dq + (Config::PACKED ? (i64)first * dq_row : batch * dq_batch) + head * dq_head, dq_row};
  warp_copy_out<Config::VECTOR>(staged, to, tile * STEP + sums_row(), rows, sums_column(), Config::DQK);
}
