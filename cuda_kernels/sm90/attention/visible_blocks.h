// Which blocks of keys a tile of Hopper's attention visits, where a mask is no band: of each, whether some of the tile's queries sees one of
// its keys, and whether each sees all (tiles.h: BlockWord). A mask_mod tells by its bounds. A mask in memory is read, once, and kept as a bit
// an element in the order of accumulators (MaskRow), so that the forward reads an eighth of it for each head, whatever its strides. What
// is found of captured arrays holds for the launch that follows. The last block of the launch puts each head's tiles in the order of their work.
//
// A warp makes a byte of each half of a word. Of a mask_mod four lanes ask for a block of keys together, and a thread block makes all words of
// one tile. Of a mask a warp asks for one block of keys, of which a lane reads four, a row after another; a thread block makes a byte.
//
// Shared memory: what warps found, and a row of counts for each. Registers: few.
#include "attention/visible_tiles.h"
#include "sm90/attention/tile_order.h"

constexpr int BN = Config::BN, BM = 64 * Config::GROUPS / GROUP_HEADS * GROUP_HEADS;
// Of a mask in memory those of a byte's blocks.
constexpr int WARPS = Config::MASK ? 8 : 16;
// Lanes that ask for one block of keys of a mask_mod, so that a warp's answers are a byte.
constexpr int TOGETHER = 4;
constexpr int MOST_ORDERED = 64;

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

// `groups`: of tiles, those of a head of an entry that the mask tells apart. Those of many groups come as they lie, the last first. counter[3]:
// blocks that are done; zero before and after the launch.
KS_BODY(WARP * WARPS, 1)
attention_visible_blocks_sm90_body(const ScoreArguments& score, const Sequences& sequences, const VisitedBlocks& visited, unsigned* counter,
                                   int q_tiles, int heads, int groups) {
  __shared__ int buckets[WARPS][BUCKETS];
  __shared__ int found[WARPS], work, last;
  earlier_kernels_wait();
  next_kernel_launch();
  const bool ordered = !Config::IN_CLUSTER && q_tiles > 1 && groups <= MOST_ORDERED;  // in clusters all tiles run at once
  const int parts = Config::MASK ? 4 * visited.words : 1, part = block_index() % parts, place = block_index() / parts;
  const int tile = place % q_tiles, own_head = place / q_tiles % heads, entry = place / q_tiles / heads, warp = warp_index();
  const Sequence own = sequences.at(entry);
  const Scores scores = score.of(entry, own_head * GROUP_HEADS, own.S_q, own.S_k);
  const int i0 = query_of(tile * BM), i1 = min_of(query_of(tile * BM + BM - 1), own.S_q - 1);
  BlockWord* const to = visited.of(entry, own_head, tile);
  const KeyRange any = scores.any(i0, i1);
  auto of_band = [&](int j0) { return Seen{j0 < any.end && j0 + BN > any.begin, true}; };
  auto last_key = [&](int j0) { return min_of(j0 + BN, own.S_k) - 1; };
  auto both = [](Seen x, Seen y) { return Seen{x.any && y.any, x.every && y.every}; };
  auto keep = [&](int at, int some, int every) {
    unsigned char* const bytes = (unsigned char*)(to + at / 4) + at % 4;
    bytes[0] = some, bytes[4] = every;
  };
  const bool there = i0 < own.S_q;  // else of a sequence that is shorter than the longest
  if (thread_index() == 0) work = 0;
  block_barrier();
  if constexpr (Config::MASK) {
    const int block = 8 * part + warp, j0 = block * BN, column = (int)score.mask.column;
    const bool aligned = column == 1 && (((u64)scores.mask.base | (u64)score.mask.row) & 3) == 0;
    Seen seen = of_band(j0);
    if (Expression::HAS_MASK && there && seen.any) seen = both(seen, seen_by_mask(scores, GROUP_HEADS, i0, i1, j0, last_key(j0)));
    // The first block's rows are made anyway: a tile that sees nothing visits that one.
    if (there && (seen.any || block == 0) && j0 < own.S_k)
      seen = both(seen, seen_by_memory(scores, column, aligned, i0, i1, j0, visited.mask_rows<BM>(to, block)));
    if (lane() == 0) found[warp] = seen.any | (seen.any && seen.every) << 8;
    block_barrier();
    if (thread_index() == 0 && there) {
      u32 bits = 0;
#pragma unroll
      for (int i = 0; i < WARPS; i++) bits |= found[i] << i;
      keep(part, bits & 0xff, bits >> 8);
    }
  } else if (there) {
    // Heads that share rows see the same.
    const auto head = scores.user.of_head(0);
    const auto rows = scores.user.own.template rows<WARP>(head, i0, i1);
#pragma unroll 1
    for (int at = warp; at < 4 * visited.words; at += WARPS) {
      const int j0 = (8 * at + lane() / TOGETHER) * BN;
      Seen seen = of_band(j0);
      if (__any_sync(~0u, seen.any)) {
        if constexpr (Expression::HAS_MASK) {
          const auto columns = scores.user.own.template columns<TOGETHER>(head, j0, last_key(j0));
          const bool some = scores.user.own.template any<TOGETHER>(head, rows, columns);
          seen = both(seen, {some, scores.user.own.template every<TOGETHER>(head, rows, columns)});
        }
      }
      // A byte of the answers of every fourth lane.
      auto byte = [](bool x) {
        u32 y = __ballot_sync(~0u, x) & 0x11111111u;
        y = (y | y >> 3) & 0x03030303u;
        y = (y | y >> 6) & 0x000f000fu;
        return (int)((y | y >> 12) & 0xffu);
      };
      const int some = byte(seen.any), every = byte(seen.any && seen.every);
      if (lane() == 0) keep(at, some, every), atomicAdd(&work, 3 * __popc(some) - __popc(every));
    }
    block_barrier();
  }
  if (thread_index() == 0) {
    const int tiles = divide_up(own.S_q * GROUP_HEADS, BM);
    if (!ordered && there && part == 0) visited.rank(entry, own_head, tiles - 1 - tile).tile = tile;
    if (!Config::MASK) visited.rank(entry, own_head, tile).work = there ? 1 + work : 0;
    if (ordered) {
      __threadfence();
      last = atomicAdd(counter + 3, 1u) == gridDim.x - 1;
      if (last) counter[3] = 0;
    }
  }
  if (!ordered) return;
  block_barrier();
  if (!last) return;
  __threadfence();
#pragma unroll 1
  for (int group = warp; group < groups; group += WARPS) {
    const int of_entry = group / heads, of_head = group % heads;
    if constexpr (Config::MASK) {
      const int tiles = divide_up(sequences.at(of_entry).S_q * GROUP_HEADS, BM);
#pragma unroll 1
      for (int i = lane(); i < q_tiles; i += WARP) {
        const volatile u32* const words = (const volatile u32*)visited.of(of_entry, of_head, i);
        int sum = 0;
        for (int word = 0; i < tiles && word < visited.words; word++) sum += 3 * __popc(words[2 * word]) - __popc(words[2 * word + 1]);
        visited.rank(of_entry, of_head, i).work = i < tiles ? 1 + sum : 0;
      }
      warp_barrier();
    }
    order_tiles(visited, of_entry, of_head, q_tiles, buckets[warp]);
  }
}
