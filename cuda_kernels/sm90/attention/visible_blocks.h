// Which blocks of keys a tile of Hopper's attention visits, where a mask is no band: of each, whether some of the tile's queries sees one of
// its keys, and whether each sees all (tiles.h: BlockWord). A mask_mod tells by its bounds. A mask in memory is read, once, and kept as a bit
// an element in the order of accumulators (MaskRow), so that the forward reads an eighth of it for each head, whatever its strides. What
// is found of captured arrays holds for the launch that follows.
//
// Of a mask_mod a block makes the words of one tile, a warp a word, a lane what is of a block of keys. Of a mask it makes a byte of each half
// of a word, a warp what is of a block of keys: a lane reads four of them, a row after another.
//
// Shared memory: eight numbers. Registers: few.
#include "attention/visible_tiles.h"
#include "sm90/attention/tiles.h"

constexpr int BN = Config::BN, BM = 64 * Config::GROUPS, WARPS = 8;

// Four neighbouring keys of a mask's row, from `key` on, a byte each; 0 from S_k on.
KS_DEVICE u32 four_keys(const unsigned char* row, int column, int key, int S_k, bool aligned) {
  if (aligned && key + 4 <= S_k) return *(const u32*)(row + key);
  u32 x = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (key + i < S_k) x |= (u32)(row[(i64)(key + i) * column] != 0) << 8 * i;
  return x;
}
// Of a warp's four_keys() the rows' words.
KS_DEVICE MaskRow mask_row(u32 x) {
  constexpr u32 EVEN = 0x55555555u;
  u32 bits[4];
#pragma unroll
  for (int i = 0; i < 4; i++) bits[i] = __ballot_sync(~0u, (x >> 8 * i & 0xff) != 0);
  return {{(bits[0] & EVEN) | (bits[1] << 1 & ~EVEN), (bits[2] & EVEN) | (bits[3] << 1 & ~EVEN),
           (bits[0] >> 1 & EVEN) | (bits[1] & ~EVEN), (bits[2] >> 1 & EVEN) | (bits[3] & ~EVEN)}};
}
// Of a block of keys from j0 on, and the queries i0 … i1: what a mask in memory leaves. Rows behind the last query see nothing. All lanes call it.
KS_DEVICE Seen seen_by_memory(const Scores& scores, int column, bool aligned, int i0, int i1, int j0, MaskRow* to) {
  const int key = j0 + 4 * lane();
  const bool mine = 4 * lane() < BN;
  u32 any = 0, every = ~0u;
#pragma unroll 1
  for (int first = 0; first < BM; first += WARP) {
    MaskRow own{};
#pragma unroll 8
    for (int r = 0; r < WARP; r++) {
      const int i = i0 + first + r;
      u32 x = 0;
      if (i <= i1) {
        if (mine) x = four_keys(&scores.mask.at(0, i, 0), column, key, scores.S_k, aligned);
        any |= x, every &= mine ? x : ~0u;
      }
      const MaskRow row = mask_row(x);
      if (lane() == r) own = row;
    }
    to[first + lane()] = own;
  }
  const bool all = (every & 0x01010101u) == 0x01010101u;
  return {__any_sync(~0u, any != 0) != 0, __all_sync(~0u, all) != 0};
}

KS_BODY(WARP * WARPS, 1)
attention_visible_blocks_sm90_body(const ScoreArguments& score, const Sequences& sequences, const VisitedBlocks& visited, int q_tiles, int heads) {
  const int parts = Config::MASK ? 4 * visited.words : 1, part = block_index() % parts, place = block_index() / parts;
  const int tile = place % q_tiles, own_head = place / q_tiles % heads, entry = place / q_tiles / heads, warp = warp_index();
  const Sequence own = sequences.at(entry);
  const Scores scores = score.of(entry, own_head * GROUP_HEADS, own.S_q, own.S_k);
  const int i0 = query_of(tile * BM), i1 = min_of(query_of(tile * BM + BM - 1), own.S_q - 1);
  if (i0 >= own.S_q) return;  // of a sequence that is shorter than the longest
  BlockWord* const to = visited.of(entry, own_head, tile);
  const KeyRange any = scores.any(i0, i1), all = scores.all_of_band(i0, i1);
  auto known = [&](int block) {
    const int j0 = block * BN, j1 = min_of(j0 + BN, own.S_k) - 1;
    Seen seen{j0 < any.end && j1 >= any.begin, j0 >= all.begin && j0 + BN <= all.end};
    if (Expression::HAS_MASK && seen.any) {
      const Seen by_mod = seen_by_mask(scores, GROUP_HEADS, i0, i1, j0, j1);
      seen = {by_mod.any, seen.every && by_mod.every};
    }
    return seen;
  };
  if constexpr (Config::MASK) {
    __shared__ u32 found[WARPS];
    const int block = 8 * part + warp, column = (int)score.mask.column;
    const bool aligned = column == 1 && (((u64)scores.mask.base | (u64)score.mask.row) & 3) == 0;
    Seen seen = known(block);
    // The first block's rows are made anyway: a tile that sees nothing visits that one.
    if ((seen.any || block == 0) && block * BN < own.S_k) {
      const Seen by_memory = seen_by_memory(scores, column, aligned, i0, i1, block * BN, visited.mask_rows<BM>(to, block));
      seen = {seen.any && by_memory.any, seen.every && by_memory.every};
    }
    if (lane() == 0) found[warp] = seen.any | seen.every << 8;
    block_barrier();
    if (thread_index() == 0) {
      u32 both = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) both |= found[i] << i;
      unsigned char* const bytes = (unsigned char*)(to + part / 4) + part % 4;
      bytes[0] = both & 0xff, bytes[4] = both >> 8;
    }
  } else {
#pragma unroll 1
    for (int word = warp; word < visited.words; word += WARPS) {
      const Seen seen = known(32 * word + lane());
      const u32 some = __ballot_sync(~0u, seen.any), every = __ballot_sync(~0u, seen.every);
      if (lane() == 0) to[word] = {some, every};
    }
  }
}
