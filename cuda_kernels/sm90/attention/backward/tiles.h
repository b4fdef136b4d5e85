// The tile scheduler: which tile of keys comes next, and the blocks of queries that it meets. The producer thread calls it; the
// consumers read the WorkTile in shared memory.
//
// Dense: tiles are handed out by a counter, `section` KV heads together, whose queries, dout and sums stay in L2. In any order a
// head's earliest keys come first: causal tiles are then the longest first. In order a tile waits only for tiles that were handed out before. The
// last keys come first, and their sums: under a mask they are ahead by the keys between them. But a launch would then end with its
// longest tiles, up to a tenth of its time: so in the last section under a causal mask the earliest keys come first, and tiles walk
// over their queries from the last, where all of them begin: BACKWARDS. Where query heads share keys, so does every other section:
// a tile walks over its group's heads one after the other, and the short tiles of one section then make room for the long ones of the
// next, so that the tiles of a head are at the same queries at about the same time. Else each of them would load these anew.
// Packed: sequence after sequence, in order all heads of one together.
// Where nothing is masked, waiting for those before would make the launch longer by a step a tile of a head: these begin at blocks of
// queries that lie apart, and so meet each block one after another without waiting: STAGGERED. A tile then waits for some with higher
// numbers, so the launch is cooperative, its blocks have the tiles in turn, and no section has more tiles than there are blocks: no block has
// two of a section, and all of a section run, since those of the sections before, which wait for nobody behind, end.
#pragma once
#include "sm90/attention/backward/sums.h"
#include "sm90/pipeline.h"

// Whether a tile of keys meets the blocks of queries that a list names (query_lists.h): a mask_mod leaves gaps.
constexpr bool LISTED = Expression::HAS_MASK;
static_assert(!LISTED || Config::IN_ORDER, "a list has the place of its tile in the order of sums");
struct ListedBlock {
  u32 bits;
  static KS_DEVICE ListedBlock of(int block, bool masked, int rank) { return {(u32)block | (u32)masked << 15 | (u32)rank << 16}; }
  KS_DEVICE int block() const { return bits & 0x7fff; }
  KS_DEVICE bool masked() const { return bits >> 15 & 1; }  // whether the mask, or the last query, may hide some pair: what the band hides is known without
  KS_DEVICE int rank() const { return bits >> 16; }         // how many tiles add to its sums before
};
// Of a tile its number of blocks, then these; the next tile's list is `lists_tile` further.
template<bool LISTED> struct ListArguments { KS_DEVICE u32* of(int, int) const { return nullptr; } };
template<> struct ListArguments<true> {
  u32* lists;
  i64 lists_batch, lists_tile;
  KS_DEVICE u32* of(int batch, int tile) const { return lists + batch * lists_batch + tile * lists_tile; }
};

// Whether some tiles walk over their queries from the last to the first.
constexpr bool BACKWARDS = Config::IN_ORDER && Config::CAUSAL && !Config::WINDOW && Config::KV_VIEW != PACKED && !Config::PREFIX && !LISTED;

// Whether the tiles of a head begin at blocks of queries that lie apart.
constexpr bool STAGGERED = Config::STAGGERED;
static_assert(!STAGGERED || (Config::IN_ORDER && !Config::CAUSAL && !Config::WINDOW && !Config::PREFIX && !LISTED && Config::KV_VIEW != PACKED),
              "every tile meets every block, and how many there are is known");

// The blocks of queries of a tile: from `first` until before `stop`, which lies behind it or, BACKWARDS, before it; STAGGERED, behind
// `stop` come those before `first`.
struct QueryWalk {
  int first, stop, way;
  // From block m to the next; whether that is the first again, of the next head.
  KS_DEVICE bool next(int& m) const {
    m += way;
    if (m == stop) m = STAGGERED ? 0 : first;
    return m == first;
  }
};

// A tile of keys, and the blocks of every head's queries that see one of them; LISTED, these are places in `list`. steps: those of all heads
// of the group.
struct alignas(16) WorkTile {
  int batch, kv_head, tile, steps;  // steps −1: no more work
  int first, stop, S_q, S_k;
  int q_first, k_first;
  union {
    struct {
      int key_head;  // whose keys and values it reads; kv_head has a part of the heads that share them, and gradients of its own
      int prefix;
    } banded;
    const u32* list;  // LISTED; then kv_head's
  };
  // From a block to the next.
  KS_DEVICE int way() const { return BACKWARDS && first > stop ? -1 : 1; }
  KS_DEVICE QueryWalk walk() const { return {first, stop, way()}; }
};

// Where the producer leaves a tile: those whose K and V are there, and the one that it prepares. The slot follows from the tile's
// place in the ring of K and V: two rounds of it are told apart by their parity.
template<int KV_STAGES> KS_DEVICE int work_slot(const PipelineState<KV_STAGES>& kv) { return kv.stage + KV_STAGES * kv.parity; }

// The number of a launch's tiles, computed on the host. An argument of the kernel, passed whole.
struct TileCount : ListArguments<LISTED> {
  int key_tiles, total, section, section_tiles;
  int cycle;  // of so many sections one walks backwards: the launch's last, and so on; 0: none
  int batch, kv_heads, head_group, head_parts;
  SumBlocks blocks;
};

// Which queries see a key, and the other way round: key j is visible to query i iff −left ≤ j − i − shift ≤ right (causal: right = 0).
struct Band {
  int left, right;
  const int* prefixes = nullptr;  // of sequences: how many keys every query sees
  KS_DEVICE int prefix(int batch, int S_k) const { return Config::PREFIX ? min_of(max_of(prefixes[batch], 0), S_k) : 0; }
  KS_DEVICE int reach() const { return Config::WINDOW ? right : 0; }
  // The first query that sees key j or a later one, and the one after the last that sees key j or an earlier one.
  KS_DEVICE int begin(int j, int shift) const { return Config::CAUSAL || Config::WINDOW ? max_of(j - shift - reach(), 0) : 0; }
  KS_DEVICE int end(int j, int shift, int S_q) const {
    return Config::WINDOW ? min_of(S_q, max_of(j - shift + left + 1, 0)) : S_q;
  }
  // How many tiles of `keys` keys the queries of the block that begins at i meet, from the first that they may; of all that is
  // before S_k.
  KS_DEVICE int tiles_met(int i, int shift, int S_k, int keys) const {
    int end = Config::CAUSAL || Config::WINDOW ? min_of(i + STEP + shift + reach(), S_k) : S_k;
    if (Config::PREFIX) end = max_of(end, 0);
    return (u32)(end + keys - 1) / keys;
  }
  // Whether no query of block m sees a key, so that nobody adds to its sums.
  KS_DEVICE bool unseen(int m, int shift, int S_k) const {
    return S_k == 0 || ((Config::CAUSAL || Config::WINDOW) && m * STEP + STEP + shift + reach() <= 0);
  }
  // How many tiles of `keys` keys add before w to the block of queries m: those of later keys, where it walks backwards of earlier;
  // STAGGERED those that begin between w's first block and this one, the nearest first.
  KS_DEVICE int earlier(const WorkTile& w, int m, int keys) const {
    if constexpr (STAGGERED) {
      const int tiles = divide_up(w.S_k, keys), blocks = divide_up(w.S_q, STEP), before = divide_up((m + 1) * tiles, blocks) - 1 - w.tile;
      return before < 0 ? before + tiles : before;
    }
    const int shift = w.S_k - w.S_q, end = tiles_met(m * STEP, shift, w.S_k, keys);
    if constexpr (!Config::PREFIX) return w.way() < 0 ? w.tile : end - 1 - w.tile;
    // Tiles that have some of the prefix, and behind them those of the band.
    const int everyone = divide_up(w.banded.prefix, keys), key = Config::WINDOW ? max_of(m * STEP + shift - left, 0) : 0;
    const int begin = max_of(max_of(key / keys, everyone), w.tile + 1);
    return max_of(everyone - 1 - w.tile, 0) + (key < w.S_k ? max_of(end - begin, 0) : 0);
  }
};

// Whether some pair of 64 keys and STEP queries is hidden. ahead: from the diagonal's query of the first key to the first query;
// tail: whether keys end among these.
KS_DEVICE bool some_hidden(const Band& band, int ahead, bool tail) {
  bool masked = tail;
  if (Config::CAUSAL || Config::WINDOW) masked = masked || ahead < 63 - band.reach();
  if (Config::WINDOW) masked = masked || ahead + STEP - 1 > band.left;
  return masked;
}

// The score of a hidden pair, or its tanh, where 1 − tanh² must be a number: p is 0 of both.
KS_DEVICE float hidden_score() { return Config::SOFTCAP ? -1e15f : -infinity(); }

template<int KEYS> struct TileScheduler {
  TileCount count;
  Sequences sequences;
  Band band;
  int (&walk)[2];  // packed, in shared memory as registers are few: the current sequence, and the number of tiles before it; zeros first

  // Tile t, which is not below the previous call's; false where there is none.
  KS_DEVICE bool next(int t, WorkTile& w) {
    bool backwards = false;
    if constexpr (Config::KV_VIEW == PACKED) {
      int tiles, at = walk[0], before = walk[1];
      for (;; at++) {
        if (at == count.batch) return false;
        tiles = divide_up(sequences.k_offsets[at + 1] - sequences.k_offsets[at], KEYS);
        if (t < before + tiles * count.kv_heads) break;
        before += tiles * count.kv_heads;
      }
      walk[0] = at, walk[1] = before;
      const int rest = t - before;
      w.batch = at;
      if constexpr (Config::IN_ORDER) {
        const int tile = (u32)rest / (u32)count.kv_heads;
        w.kv_head = rest - tile * count.kv_heads, w.tile = tiles - 1 - tile;
      } else {
        w.kv_head = (u32)rest / (u32)tiles, w.tile = rest - w.kv_head * tiles;
      }
    } else {
      if (t >= count.total) return false;
      const int section = (u32)t / (u32)count.section_tiles, rest = t - section * count.section_tiles;
      const int width = min_of(count.section, count.batch * count.kv_heads - section * count.section);
      w.tile = (u32)rest / (u32)width;
      const int head = section * count.section + (rest - w.tile * width);
      backwards = BACKWARDS && count.cycle > 0 && (u32)((count.total - 1) / count.section_tiles - section) % (u32)count.cycle == 0;
      if (Config::IN_ORDER && !backwards) w.tile = count.key_tiles - 1 - w.tile;
      w.batch = (u32)head / (u32)count.kv_heads, w.kv_head = head - w.batch * count.kv_heads;
    }
    const Sequence s = sequences.at(w.batch);
    w.S_q = s.S_q, w.S_k = s.S_k, w.q_first = s.q_first, w.k_first = s.k_first;
    if constexpr (LISTED) {
      const u32* const own = count.of(opaque(w.batch), w.tile);  // else registers are spilled
      w.list = own + 1, w.first = 0, w.stop = own[0], w.steps = w.stop * count.head_group;
    } else {
      const int S_k = s.S_k, key = w.tile * KEYS, shift = S_k - s.S_q;
      w.banded.key_head = Config::KV_VIEW == PACKED ? w.kv_head : (u32)w.kv_head / (u32)count.head_parts;
      int begin = (u32)band.begin(key, shift) / STEP;
      int end = (u32)(band.end(min_of(key + KEYS, S_k) - 1, shift, opaque(s.S_q)) + STEP - 1) / STEP;
      if constexpr (Config::PREFIX) {
        w.banded.prefix = band.prefix(w.batch, S_k);
        if (key < w.banded.prefix) begin = 0, end = divide_up(s.S_q, STEP);
      }
      w.first = backwards ? end - 1 : STAGGERED ? (u32)(w.tile * end) / (u32)divide_up(S_k, KEYS) : begin;
      w.stop = backwards ? begin - 1 : end;
      w.steps = key < S_k ? max_of(end - begin, 0) * count.head_group : 0;
    }
    return true;
  }
};
