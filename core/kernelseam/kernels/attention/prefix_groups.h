// A batch's block table in two: the pages that groups of neighbouring entries have in common at the front, and those that are left to
// each entry. Of what common_pages.h counted, a group is a longest run of entries each with a page or more in common with the one
// before; it shares as many as all of them do. Groups beyond `groups` share none.
//
// The shared part is a batch of 2·groups + 1 packed sequences of queries: those of no group before the first one, those of the first,
// those between, … Sequences of no group have no keys; so have groups that there are not, behind the last row. The own part has the
// entries' queries, the lengths less the shared keys, and a table that begins behind the shared pages.
//
// One warp an entry: its lanes look over the whole batch for the entry's group, then copy its row of the table. Shared memory: none.
#include "generated/config.h"
#include "tile/tile.h"

KS_KERNEL(WARP * Config::WARPS, 1)
prefix_groups(const int* table, const int* lengths, const int* offsets, const int* common, int* shared_rows, int* shared_lengths,
              int* shared_table, int* own_lengths, int* own_table, i64 table_row, int batch, int S_q, int S_k, int page_size,
              int width, int total, int groups) {
  const int entry = (int)block_index() * Config::WARPS + warp_index();
  if (entry >= batch) return;

  int begin = 0, end = batch, number = 0, all = 0;  // its run; runs of two and more up to it, and in the whole batch
  for (int i = lane(); i < batch; i += WARP) {
    if (common[i]) continue;
    if (i <= entry) begin = max_of(begin, i);
    else end = min_of(end, i);
    const int is_group = i + 1 < batch && common[i + 1];
    all += is_group;
    if (i <= entry) number += is_group;
  }
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) {
    begin = max_of(begin, shuffle_xor(begin, m));
    end = min_of(end, shuffle_xor(end, m));
    number += shuffle_xor(number, m);
    all += shuffle_xor(all, m);
  }
  const bool shares = end - begin > 1 && number <= groups;
  int pages = shares ? width : 0;
  for (int i = begin + 1 + lane(); i < end; i += WARP) pages = min_of(pages, common[i]);
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) pages = min_of(pages, shuffle_xor(pages, m));

  const int* const from = table + entry * table_row;
  const int keys = max_of(min_of(lengths[entry], S_k), 0) - pages * page_size;
  const int columns = min_of((keys + page_size - 1) / page_size, width - pages);
  for (int c = lane(); c < columns; c += WARP) own_table[(i64)entry * width + c] = from[pages + c];
  if (lane() == 0) own_lengths[entry] = keys;

  auto row_of = [&](int e) { return Config::PACKED ? offsets[e] : e * S_q; };
  if (shares && entry == begin) {
    const int sequence = 2 * number - 1;
    for (int c = lane(); c < pages; c += WARP) shared_table[(i64)sequence * width + c] = from[c];
    if (lane() == 0) {
      shared_lengths[sequence] = pages * page_size;
      shared_rows[sequence] = row_of(begin), shared_rows[sequence + 1] = row_of(end);
    }
  }
  if (entry > 0) return;
  for (int g = lane(); g <= groups; g += WARP) {
    shared_lengths[2 * g] = 0;
    if (g == groups) shared_rows[0] = 0, shared_rows[2 * g + 1] = total;
    else if (g >= all) shared_lengths[2 * g + 1] = 0, shared_rows[2 * g + 1] = shared_rows[2 * g + 2] = total;
  }
}
