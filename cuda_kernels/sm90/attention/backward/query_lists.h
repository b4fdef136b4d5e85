// Before the gradients under a mask_mod: the blocks of queries that each tile of keys meets (tiles.h: ListedBlock), of the words that
// visible_blocks.h makes of blocks of STEP queries and KEYS keys. A block whose queries see no key goes to the first tile: somebody has to
// store its sums.
//
// A warp makes a tile's list, a lane asks for a block. It reads an eighth of a byte of a block and tile for each tile.
#include "sm90/attention/backward/tiles.h"

constexpr int KEYS = 128, WARPS = 4;
// As the forward's tiles.h has them: `every` is without the band.
struct BlockWord { u32 some, every; };

// The list of a sequence's tile, by a warp; `blocks`: the words of its first block of queries.
KS_DEVICE void list_blocks(const BlockWord* blocks, int blocks_tile, int words, int tile, const Sequence& s, u32* to) {
  const int query_blocks = tile * KEYS < s.S_k ? divide_up(s.S_q, STEP) : 0;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first < query_blocks; first += WARP) {
    const int m = first + lane();
    bool some = false, every = false;
    int rank = 0;
    if (m < query_blocks) {
      const BlockWord* const own = blocks + (i64)m * blocks_tile;
      const BlockWord here = own[tile / 32];
      some = here.some >> tile % 32 & 1, every = here.every >> tile % 32 & (m * STEP + STEP <= s.S_q);
      rank = __popc(here.some >> tile % 32 >> 1);
#pragma unroll 1
      for (int i = tile / 32 + 1; i < words; i++) rank += __popc(own[i].some);
      if (tile == 0 && rank == 0 && !some) some = true, every = false;
    }
    const u32 found = __ballot_sync(~0u, some);
    if (some) to[1 + count + __popc(found & ((1u << lane()) - 1))] = ListedBlock::of(m, !every, rank).bits;
    count += __popc(found);
  }
  if (lane() == 0) to[0] = count;
}

KS_KERNEL(WARP * WARPS, 1)
attention_backward_lists_sm90(const BlockWord* blocks, i64 blocks_batch, int blocks_tile, int words, u32* lists, i64 lists_batch, i64 lists_tile,
                              Sequences sequences, int key_tiles, int total) {
  earlier_kernels_wait();
  next_kernel_launch();
  const int place = block_index() * WARPS + warp_index();
  if (place >= total) return;
  const int entry = place / key_tiles, tile = place - entry * key_tiles;
  list_blocks(blocks + entry * blocks_batch, blocks_tile, words, tile, sequences.at(entry), lists + entry * lists_batch + tile * lists_tile);
}
