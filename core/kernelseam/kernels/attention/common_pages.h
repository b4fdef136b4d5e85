// How many pages each entry of a batch has in common with the entry before it, from the first on: those in the same column of the block
// table whose keys all queries of both entries see, as causal ones do but for their own.
//
// One warp an entry, its lanes over the columns of two rows of the table. Shared memory: none. Registers: few.
#include "generated/config.h"
#include "tile/tile.h"

KS_KERNEL(WARP * Config::WARPS, 1)
common_pages(const int* table, const int* lengths, const int* offsets, int* common, i64 table_row, int batch, int S_q, int S_k,
             int page_size, int width) {
  const int entry = (int)block_index() * Config::WARPS + warp_index();
  if (entry >= batch) return;
  int first = entry ? width : 0;  // column that differs
  for (int e = max_of(entry - 1, 0); e <= entry; e++) {
    const int queries = Config::PACKED ? offsets[e + 1] - offsets[e] : S_q;
    first = min_of(first, max_of(min_of(lengths[e], S_k) - queries, 0) / page_size);
  }
  const int most = first, *const own = table + entry * table_row, *const before = own - table_row;
#pragma unroll 4
  for (int c = lane(); c < most; c += WARP) {
    const int page = own[c];
    if (page != before[c] || page < 0) first = min_of(first, c);
  }
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) first = min_of(first, shuffle_xor(first, m));
  if (lane() == 0) common[entry] = first;
}
