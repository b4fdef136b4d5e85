// The tile scheduler: which tile of queries comes next, and its blocks of keys. The producer thread calls it; the consumers
// read the WorkTile in shared memory.
//
// Dense: tile t of the launch is one of a head's q_tiles. Under a mask that may cut late keys, tiles differ in length and are
// handed out by a counter, the longest first: `section` heads walk their tiles together, as many as have their K and V in L2 at
// once, and the last section has so many that its short tiles fill the launch's end. Under a mask that is no band visible_blocks.h says which
// tiles are the longest. Packed: CLASSES of lengths, each of half the keys of the class before, the longest first, so that short tiles fill the
// launch's end; within a class sequence after sequence.
//
// Packed with keys in pages, a batch of new and of old sequences: the tiles of those whose rows one consumer has, which wait for memory, and
// the tiles of all others, which multiply, are two lists with a counter each. One block in FEW_EVERY begins with the first list, all others
// with the second, and goes over to the other one when its own is at its end: so memory and tensor cores are busy at the same time.
//
// For few queries: a tile's rows are GROUP_HEADS query heads of one KV head for one query after the other, so that they share its
// keys; with IN_PARTS a tile's blocks of keys are cut into parts, each a work tile of its own: where they make a cluster, and of packed rows, those of
// neighbouring blocks of the grid; else all tiles' first parts come first, so that tiles that share keys read them from memory once.
#pragma once
#include "attention/sequences.h"
#include "sm90/ptx.h"

constexpr int GROUP_HEADS = Config::GROUP_HEADS;
// What a row is. A tile has the heads of as many whole queries as fit, one query after the other; rows behind them are spare, zeros which leave
// no result. Rows are numbered without spare ones, so that the number says the query and the head.
KS_DEVICE int query_of(int row) { return row / GROUP_HEADS; }
KS_DEVICE int group_head_of(int row) { return row % GROUP_HEADS; }

// Whether blocks of keys are visited from the diagonal on, first down to the first one and then up to the last: as ALiBi's scores fall on both
// sides, references that a tile begins with serve to its end. Else from the last one to the first.
constexpr bool OUTWARDS =
    Config::ALIBI && Scores::BANDED && !Config::CAUSAL && !Config::WINDOW && !HAS_BIAS && !Config::IN_PARTS && Config::KV_VIEW != PAGED;

// Whether one part of all tiles comes before the next.
constexpr bool PARTS_APART = Config::IN_PARTS && !Config::IN_CLUSTER && Config::Q_VIEW != PACKED;

// A tile of rows, and its blocks of keys.
struct alignas(16) WorkTile {
  int batch, head, kv_head, row;  // head: of the tile's first row
  int begin, end;             // blocks with a visible key, at least one; end 0: no more work
  int unmasked_begin, unmasked_end;   // of these, the blocks without masked keys
  int S_q, S_k, q_first, k_first;
  int part;  // of the keys
  int diagonal;  // where blocks are visited OUTWARDS, the first of them
  int group, query;  // where heads share rows, the number of those that do, and the first row's query: no division tells the producer

  // The block that is visited when `left` − begin are still to come.
  KS_DEVICE int visited(int left) const {
    if (!OUTWARDS) return left;
    const int before = end - 1 - left;
    return before <= diagonal - begin ? diagonal - before : begin + before;
  }
};

// The number of a launch's tiles, computed on the host. An argument of the kernel, passed whole.
struct TileCount {
  int q_tiles, total, section, last_section, batch, heads, head_group, parts;  // heads: KV heads, where query heads share tiles
};

// Of 32 blocks of keys, those of which some of a tile's rows sees a key, and of these the ones of which masks beside the band hide none from any row.
struct BlockWord { u32 some, every; };
// Which keys of a block a row sees, as a mask in memory says it: bits 2j and 2j + 1 of word i are those of the columns 8j + 2i and 8j + 2i + 1,
// which the lanes whose number is i modulo 4 have of a product.
struct alignas(16) MaskRow { u32 words[4]; };
// Of a head's tiles the number of the one that comes in this place, the longest first; of the tile with this number, how long it takes, in
// half blocks of keys: 0 where a sequence has no such tile.
struct TileRank { int tile, work; };
static_assert(sizeof(TileRank) == sizeof(BlockWord), "it lies behind a tile's words");
// The blocks that tiles visit, where a mask is no band: `words` of a tile of rows, a TileRank, and with a mask in memory behind them the rows
// of each of its blocks; the next tile's are `tile` words further (visible_blocks.h).
struct VisitedBlocks {
  BlockWord* base;
  i64 batch, head;
  int tile, words;

  KS_DEVICE BlockWord* of(int entry, int head, int tile) const { return base + entry * batch + head * this->head + (i64)tile * this->tile; }
  KS_DEVICE TileRank& rank(int entry, int head, int place) const { return *(TileRank*)(of(entry, head, place) + words); }
  // The first row of a block, of the tile with these words.
  template<int BM> KS_DEVICE MaskRow* mask_rows(BlockWord* own, int block) const { return (MaskRow*)(own + divide_up(words + 1, 2) * 2) + block * BM; }
};
// The place of the highest bit that is set.
KS_DEVICE int highest_bit(u32 x) { return 31 - __clz((int)x); }
// The last visited block of [from, end), else from − 1; the first, else end. `word`: the one that `end` lies in, then that of the block.
KS_DEVICE int last_visited(const BlockWord* words, BlockWord& word, int from, int end) {
  for (; end > from; end = (end - 1) / 32 * 32) {
    if (end % 32 == 0) word = words[end / 32 - 1];
    const u32 some = word.some << (31 - (end - 1) % 32);
    if (some) return max_of(end - 32 + highest_bit(some), from - 1);
  }
  return from - 1;
}
KS_DEVICE int first_visited(const BlockWord* words, int from, int end) {
  while (from < end) {
    const int word = from / 32;
    const u32 some = words[word].some & ~0u << from % 32;
    if (some) return min_of(32 * word + highest_bit(some & (0u - some)), end);
    from = 32 * word + 32;
  }
  return end;
}

// Whether a warp looks for tiles, each lane in a sequence.
constexpr bool BY_WARP = Config::Q_VIEW == PACKED;
// Whether tiles are in lists, of sequences with more rows than a consumer has and of the others.
constexpr bool TWO_LISTS = BY_WARP && Config::KV_VIEW == PAGED;
enum { MANY_ROWS, FEW_ROWS, ALL_ROWS };

template<int BM, int BN> struct TileScheduler {
  // A bias is read once for all heads and entries that share it, whose tiles are walked together.
  static constexpr bool RANKED = !Scores::BANDED;  // places are those of VisitedBlocks
  static constexpr bool LONGEST_FIRST = Config::CAUSAL || !Scores::BANDED || HAS_BIAS;
  TileCount count;
  Sequences sequences;
  const ScoreArguments& score;
  const VisitedBlocks& visited;
  int list = ALL_ROWS;
  int at = 0, before = 0;  // packed: the current window, a warp's sequences of a class, and the number of tiles before

  static constexpr int CLASSES = 3, FEW_EVERY = 2;
  // The list that a block begins with.
  KS_DEVICE static int first_list(int block) { return block % FEW_EVERY == FEW_EVERY - 1 ? FEW_ROWS : MANY_ROWS; }
  // Its first tile of that list.
  KS_DEVICE int first(int block) const {
    const int few = block / FEW_EVERY;
    return list == ALL_ROWS ? block : list == FEW_ROWS ? few : block - few;
  }
  // Of so many blocks, those that begin with the list.
  KS_DEVICE int beginners(int blocks) const {
    const int few = blocks / FEW_EVERY;
    return list == ALL_ROWS ? blocks : list == FEW_ROWS ? few : blocks - few;
  }
  // Goes over to the other list, if this one is the block's first.
  KS_DEVICE bool change_list(int block) {
    if (list != first_list(block)) return false;
    list ^= 1, at = 0, before = 0;
    return true;
  }

  // The tiles of a head of a sequence, where it is in the list and in class i.
  KS_DEVICE int tiles_of(int entry, int i) const {
    const Sequence s = sequences.at(entry);
    const int rows = s.S_q * GROUP_HEADS, most = sequences.S_k >> i;
    const bool in_list = list == ALL_ROWS || (rows <= 64) == (list == FEW_ROWS);
    const bool in_class = (i == 0 || s.S_k <= most) && (i == CLASSES - 1 || s.S_k > most / 2);
    return in_list && in_class ? divide_up(rows, BM) : 0;
  }
  // The sequence that has tile t of the list, the tiles of each of its heads, and those of the list before it; false where there is none. By a
  // warp, whose lanes look at a sequence each.
  KS_DEVICE bool find_in_list(int t, int& entry, int& tiles, int& earlier) {
    const int windows = divide_up(count.batch, WARP);
    for (; at < windows * CLASSES; at++) {
      const int i = at / windows, first = (at - i * windows) * WARP;
      tiles = first + lane() < count.batch ? tiles_of(first + lane(), i) : 0;
      int upto = tiles * count.heads;  // of the lanes up to this one
#pragma unroll
      for (int d = 1; d < WARP; d *= 2) {
        const int x = shuffle_up(upto, d);
        if (lane() >= d) upto += x;
      }
      if (const u32 behind = __ballot_sync(~0u, t - before < upto)) {
        const int place = highest_bit(behind & (0u - behind));
        entry = first + place, tiles = __shfl_sync(~0u, tiles, place);
        earlier = before + __shfl_sync(~0u, upto, place) - tiles * count.heads;
        return true;
      }
      before += __shfl_sync(~0u, upto, WARP - 1);
    }
    return false;
  }

  // Tile t, which is not below the previous call's of the list; false where there is none. BY_WARP all its lanes call it.
  KS_DEVICE bool next(int t, WorkTile& w) {
    int tile, entry, head;
    w.part = 0;
    if (PARTS_APART) {
      w.part = t / count.total, t -= w.part * count.total;
      if (w.part >= count.parts) return false;
    } else if (Config::IN_PARTS) {
      w.part = t % count.parts, t /= count.parts;
    }
    if constexpr (BY_WARP) {
      int tiles, earlier;
      if (!find_in_list(t, entry, tiles, earlier)) return false;
      head = (t - earlier) / tiles, tile = (t - earlier) - head * tiles;
      if (LONGEST_FIRST && !RANKED) tile = tiles - 1 - tile;
    } else {
      if (t >= count.total) return false;
      int index;
      if constexpr (LONGEST_FIRST) {
        const int fore = count.batch * count.heads - count.last_section, per = count.section * count.q_tiles;
        const bool last = t >= fore * count.q_tiles;
        const int first = last ? fore : t / per * count.section;
        const int width = last ? count.last_section : min_of(count.section, fore - first);
        const int turn = (t - first * count.q_tiles) / width;
        index = t - first * count.q_tiles - turn * width + first, tile = RANKED ? turn : count.q_tiles - 1 - turn;
      } else {
        index = t / count.q_tiles, tile = t - index * count.q_tiles;
      }
      if (HAS_BIAS && score.bias.batch == 0) head = index / count.batch, entry = index - head * count.batch;
      else entry = index / count.heads, head = index - entry * count.heads;
    }
    if (RANKED) tile = visited.rank(entry, head, tile).tile;
    w.batch = entry, w.head = head * GROUP_HEADS, w.kv_head = head / count.head_group, w.row = tile * BM;
    const Sequence s = sequences.at(entry);
    w.S_q = s.S_q, w.S_k = s.S_k, w.q_first = s.q_first, w.k_first = s.k_first;
    const Scores scores = score.of(entry, s.S_q, s.S_k);
    constexpr int QUERIES = BM / GROUP_HEADS;
    const int first_query = tile * QUERIES, last_query = min_of(first_query + QUERIES - 1, s.S_q - 1);
    if (GROUP_HEADS > 1) w.group = head, w.query = first_query;
    const KeyRange any = scores.any(first_query, last_query);
    const KeyRange all = RANKED ? scores.all_of_band(first_query, last_query) : scores.all(first_query, last_query);
    int begin = any.begin / BN, end = divide_up(any.end, BN);
    if (Config::IN_PARTS) {
      const int from = begin, blocks = max_of(end - begin, 0);
      begin = from + blocks * w.part / count.parts, end = from + blocks * (w.part + 1) / count.parts;
      if (begin >= end) w.S_k = 0;  // a part without keys
    }
    if (!Scores::BANDED && begin < end) {
      const BlockWord* const words = visited.of(entry, head, tile);
      BlockWord word = words[(end - 1) / 32];
      const int last = last_visited(words, word, begin, end);
      end = max_of(last, begin) + 1, begin = first_visited(words, begin, end - 1);
    }
    w.begin = begin < end ? begin : 0, w.end = begin < end ? end : 1;  // at least one block, if wholly hidden
    if (OUTWARDS) w.diagonal = max_of(min_of((last_query + scores.shift()) / BN, w.end - 1), w.begin);
    w.unmasked_begin = divide_up(all.begin, BN), w.unmasked_end = all.end / BN;
    if (Config::IN_PARTS && w.S_k == 0) w.unmasked_begin = w.unmasked_end = 0;
    return true;
  }
};
