// Which blocks of keys a tile of Hopper's attention visits, where a mask_mod is no band: of each, whether some of the tile's queries sees one
// of its keys, and whether each sees all (tiles.h: BlockWord), as its bounds tell. What is found of captured arrays holds for the launch that
// follows.
//
// A block makes the words of one tile, a warp a word, a lane what is of a block of keys. Registers: few.
#include "attention/visible_tiles.h"
#include "sm90/attention/tiles.h"

constexpr int BN = Config::BN, BM = 64 * Config::GROUPS, WARPS = 8;

KS_BODY(WARP * WARPS, 1)
attention_visible_blocks_sm90_body(const ScoreArguments& score, const Sequences& sequences, BlockWord* base, i64 batch, i64 head, int words,
                                   int q_tiles, int heads) {
  const int place = block_index(), tile = place % q_tiles, own_head = place / q_tiles % heads, entry = place / q_tiles / heads;
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
#pragma unroll 1
  for (int word = warp_index(); word < words; word += WARPS) {
    bool some, every;
    known(32 * word + lane(), some, every);
    const u32 some_word = __ballot_sync(~0u, some), every_word = __ballot_sync(~0u, every);
    if (lane() == 0) to[word] = {some_word, every_word};
  }
}
