// Which blocks of keys a tile of Hopper's attention visits, where a mask is no band: of each, whether some of the tile's queries sees one of
// its keys, and whether each sees all (tiles.h: BlockWord). A mask_mod is known by its bounds, a mask over queries and keys is read. What
// is found of captured arrays holds for the launch that follows.
//
// Of a mask_mod a block makes the words of one tile, a warp a word, a lane what is of a block of keys. Of a mask a block makes a byte of each
// half of a word, a warp what is of a block of keys: a row of it is what the warp reads at once.
//
// Shared memory: eight numbers. Registers: few.
#include "attention/visible_tiles.h"
#include "sm90/attention/tiles.h"

constexpr int BN = Config::BN, BM = 64 * Config::GROUPS, WARPS = 8;

// Four neighbouring keys of a mask's row, from `key` on; those from S_k on count as the last.
KS_DEVICE u32 four_keys(const unsigned char* row, int column, int key, int S_k, bool aligned) {
  if (aligned && key + 4 <= S_k) return *(const u32*)(row + key);
  u32 x = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) x |= (u32)(row[(i64)inside(key + i, S_k) * column] != 0) << 8 * i;
  return x;
}
KS_DEVICE bool each_byte(u32 x) { return (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu | x) & 0x80808080u) == 0x80808080u; }

KS_BODY(WARP * WARPS, 1)
attention_visible_blocks_sm90_body(const ScoreArguments& score, const Sequences& sequences, BlockWord* base, i64 batch, i64 head, int words,
                                   int q_tiles, int heads) {
  const int parts = Config::MASK ? 4 * words : 1, part = block_index() % parts, place = block_index() / parts;
  const int tile = place % q_tiles, own_head = place / q_tiles % heads, entry = place / q_tiles / heads;
  const Sequence own = sequences.at(entry);
  const Scores scores = score.of(entry, own_head * GROUP_HEADS, own.S_q, own.S_k);
  const int i0 = query_of(tile * BM), i1 = min_of(query_of(tile * BM + BM - 1), own.S_q - 1);
  if (i0 >= own.S_q) return;  // of a sequence that is shorter than the longest
  BlockWord* const to = base + entry * batch + own_head * head + (i64)tile * words;
  const KeyRange any = scores.any(i0, i1), all = scores.all_of_band(i0, i1);
  auto known = [&](int block, bool& some, bool& every) {
    const int j0 = block * BN, j1 = min_of(j0 + BN, own.S_k) - 1;
    some = j0 < any.end && j1 >= any.begin, every = j0 >= all.begin && j0 + BN <= all.end;
    if (Expression::HAS_MASK && some) {
      const Seen seen = seen_by_mask(scores, GROUP_HEADS, i0, i1, j0, j1);
      some = seen.any, every = every && seen.every;
    }
  };
  bool some, every;
  if constexpr (Config::MASK) {
    __shared__ u32 found[WARPS];
    const int key = (8 * part + warp_index()) * BN + 4 * lane(), column = (int)score.mask.column;
    const bool aligned = column == 1 && (((u64)scores.mask.base | scores.mask.head | score.mask.row) & 3) == 0;
    known(8 * part + warp_index(), some, every);
    bool one = false, each = true;
    if (some && 4 * lane() < BN && key < own.S_k)
#pragma unroll 1
      for (int h = 0; h < GROUP_HEADS; h++)
#pragma unroll 8
        for (int i = i0; i <= i1; i++) {
          const u32 x = four_keys(&scores.mask.at(h, i, 0), column, key, own.S_k, aligned);
          one = one || x, each = each && each_byte(x);
        }
    some = __any_sync(~0u, one), every = __all_sync(~0u, each) && every;
    if (lane() == 0) found[warp_index()] = some | every << 8;
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
    for (int word = warp_index(); word < words; word += WARPS) {
      known(32 * word + lane(), some, every);
      const u32 some_word = __ballot_sync(~0u, some), every_word = __ballot_sync(~0u, every);
      if (lane() == 0) to[word] = {some_word, every_word};
    }
  }
}
