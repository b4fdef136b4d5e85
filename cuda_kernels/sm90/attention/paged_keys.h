// Keys and values in pages: the Keys policy (keys.h) of a block table.
//
// To TMA all pages are rows of one matrix for each head: row = page · (rows from a page to the next) + row in the page. A block of BN keys
// comes in pieces of ROWS rows that lie in one page each: a box for each panel, or where a block has its PanelsTogether one for all.
//
// The producer is a warp. Its lanes read the block table ahead, a piece each: those of CHUNK blocks at once, one chunk before it is used,
// and a tile's first when the tile is known. So a block waits for no look-up. Where the pieces lie goes through shared memory, and one
// lane, which the compiler knows to be one, issues the boxes. A piece behind a sequence's end is not looked up: it lies outside the
// map, so it arrives as zeros (where rows are copied, as the pool's first). Rows of the last page behind the end are masked, as are those
// behind a dense sequence's.
//
// Where eight neighbouring rows are no box, as the page size or the rows from a page to the next are no multiple of 8, a piece is a row (COPIED): the
// producer's lanes, which look rows up, copy half of K's, and other warps the others and V's (row_copying.h), for which the places of as many blocks
// are kept as V's ring has stages, and two more.
#pragma once
#include "sm90/attention/row_copies.h"

// The least power of two that is not below n.
KS_DEVICE constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

template<class T, int BN, int ROWS> struct PagedKeys {
  Matrices<const T> k, v;  // batch: from a page to the next
  Pages pages;
  int page_rows;  // from a page's first row to the next one's, in rows

  static constexpr int SIZE = sizeof(T), UNIT = min_of(ROWS, 8);  // rows that a place in the map counts
  // Of a block: its pieces, and its places among those of a chunk.
  static constexpr int PIECES = BN / ROWS, PLACES = power_of_two(PIECES), LOOK_UPS = max_of(PLACES / WARP, 1), CHUNK = max_of(WARP / PLACES, 1);
  static constexpr bool COPIED = ROWS == 1;
  static_assert(BN % ROWS == 0 && (COPIED || ROWS % 8 == 0), "whole pieces");
  static_assert(!COPIED || CHUNK == 1, "each block has its places");
  static constexpr bool SKIPS = !Scores::BANDED;  // blocks come by a list
  static_assert(!COPIED || !SKIPS, "the places of the rows of as many blocks as there are stages are of neighbours");

  static constexpr int SLOTS = COPIED ? Config::STAGES + 2 : 2;
  static KS_DEVICE int following_slot(int slot) { return SLOTS == 2 ? slot ^ 1 : slot + 1 == SLOTS ? 0 : slot + 1; }
  struct Places { alignas(16) int places[SLOTS][WARP * LOOK_UPS]; };  // of a chunk's pieces; V is a block behind K
  struct PlacesOfCopies : Places {  // of a stage of K, when its copies may begin: its KV head, -1 behind the last
    int kv_head[Config::STAGES];
    u64 k_begun[Config::STAGES];
  };
  typedef typename conditional<COPIED, PlacesOfCopies, Places>::type Memory;
  struct Place { int slot; };
  template<class Block, int WIDTH> using Copies = RowCopies<T, BN, Block, WIDTH>;
  static constexpr bool IN_REGISTERS = PIECES <= 16;
  struct Boxes {
    int at[IN_REGISTERS ? PLACES : 1];
    const int* from;
    int head;
    KS_DEVICE int place(int i) const { return IN_REGISTERS ? at[i] : from[i]; }
  };

  static KS_DEVICE void init(Memory& memory) {
    if constexpr (COPIED)
      for (u64& begun : memory.k_begun) barrier_init(shared_address(&begun), 1);
  }
  // Key `key` of a sequence, as a row of the matrix of all pages.
  KS_DEVICE int pool_row(int key, int page) const { return page * page_rows + key - pages.size.quotient(key) * pages.size.d; }
  KS_DEVICE int page_of(const WorkTile& w, int key) const { return pages.table[w.batch * pages.table_row + pages.size.quotient(key)]; }

  struct Loader : Agreement<true> {
    const PagedKeys& keys;
    Memory& memory;
    int page[LOOK_UPS], first_page[LOOK_UPS];  // of the chunk below, and of the next tile's last chunk, which comes first
    int at = 0;  // where blocks come by a list: the chunk of the block before

    KS_DEVICE Loader(const PagedKeys& keys, Memory& memory) : keys(keys), memory(memory) {}
    KS_DEVICE int first_key(int chunk, int i) const {
      const int place = chunk * (WARP * LOOK_UPS) + i * WARP + lane();
      return (PIECES == PLACES ? place : place / PLACES * PIECES + place % PLACES) * ROWS;
    }
    // The pages themselves: what is computed from them would wait for them here.
    KS_DEVICE void look_up(const WorkTile& w, int chunk, int (&to)[LOOK_UPS]) const {
#pragma unroll
      for (int i = 0; i < LOOK_UPS; i++) {
        const int key = first_key(chunk, i);
        to[i] = chunk >= 0 && key < w.S_k ? keys.page_of(w, key) : -1;
      }
    }
    // Whether a block of the tile is the first of its chunk, in the order of a walk.
    KS_DEVICE bool enters(int block, int chunk) const { return SKIPS ? chunk != at : (unsigned)block % CHUNK == CHUNK - 1; }
    KS_DEVICE void begin(const WorkTile& w) { look_up(w, (unsigned)(w.end - 1) / CHUNK, first_page); }
    KS_DEVICE Place find(const WorkTile& w, int block, bool first, Place before) {
      const int chunk = (unsigned)block / CHUNK;
      if (first || enters(block, chunk)) {
        if (SKIPS && !first && chunk != at - 1) look_up(w, chunk, page);  // those between are left out
        if (SKIPS) at = chunk;
        before.slot = following_slot(before.slot);
#pragma unroll
        for (int i = 0; i < LOOK_UPS; i++) {
          const int own = page[i], of_tile = first_page[i];
          const int row = keys.pool_row(first_key(chunk, i), first ? of_tile : own);
          memory.places[before.slot][i * WARP + lane()] = COPIED ? max_of(row, 0) : row / UNIT;  // copied, behind the end any row serves
        }
        warp_barrier();
        look_up(w, chunk - 1, page);
      }
      return before;
    }
    // Read by all lanes before the wait for a stage, so that boxes are issued one after the other behind it.
    KS_DEVICE Boxes boxes(const WorkTile& w, int block, Place place) const {
      Boxes x;
      x.head = w.kv_head;
      x.from = memory.places[place.slot] + (unsigned)block % CHUNK * PLACES;
      if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < PIECES; i += 4) {
          const int4 y = *(const int4*)(x.from + i);
          x.at[i] = y.x, x.at[i + 1] = y.y, x.at[i + 2] = y.z, x.at[i + 3] = y.w;
        }
      }
      return x;
    }
    KS_DEVICE void begin_copies(int stage, int kv_head) const {
      if constexpr (COPIED) {
        if (lane() != 0) return;
        memory.kv_head[stage] = kv_head;
        barrier_arrive(shared_address(&memory.k_begun[stage]));
      }
    }
    KS_DEVICE void stop(int stage) const { begin_copies(stage, -1); }
    template<class Block, int WIDTH> KS_DEVICE void copy_keys(u32 to, u32 barrier, int stage, const WorkTile& w, Place place) const {
      begin_copies(stage, w.kv_head);
      const Copies<Block, WIDTH> rows{to, keys.k.base + w.kv_head * keys.k.head, keys.k.row, memory.places[place.slot]};
      rows.template copy<COPYING_WARPS>(0, BN);
      async_copies_arrive(barrier);
    }
    template<class Block>
    KS_DEVICE void load(u32 to, const TensorMap& map, u32 barrier, const WorkTile& w, int, const Boxes& boxes) const {
      if constexpr (Block::TOGETHER) {
#pragma unroll IN_REGISTERS ? PIECES : 1
        for (int i = 0; i < PIECES; i++)
          tma_load_5d(to + i * (ROWS * Block::EIGHT_ROWS / 8), map, barrier, 0, 0, 0, boxes.head, boxes.place(i));
      } else {
#pragma unroll 1
        for (int panel = 0; panel < Block::PANELS; panel++, to += Block::PANEL)
#pragma unroll IN_REGISTERS ? PIECES : 1
          for (int i = 0; i < PIECES; i++)
            tma_load(to + i * (ROWS * Block::ROW), map, barrier, panel * (Block::ROW / SIZE), 0, boxes.head, boxes.place(i));
      }
    }
  };

  // A walk by which lane i knows the row of the block's key 8·i, and one that looks each of the lane's keys up, of single rows.
  struct KnownWalk {
    const T* base;
    int row, pool_row;
    KS_DEVICE KnownWalk from(int column) const { return {base + column, row, pool_row}; }
    KS_DEVICE const T* at(int n) const { return base + (i64)shuffle(pool_row, n) * row; }
    KS_DEVICE void next() {}
  };
  struct LookedUpWalk {
    const PagedKeys& keys;
    const WorkTile& w;
    const T* base;
    int first;
    KS_DEVICE LookedUpWalk from(int column) const { return {keys, w, base + column, first}; }
    KS_DEVICE const T* at(int n) const {
      const int key = first + 8 * n;
      return base + (i64)keys.pool_row(key, keys.page_of(w, key)) * keys.k.row;
    }
    KS_DEVICE void next() {}
  };
  KS_DEVICE auto key_rows(const WorkTile& w, int first, int lane, int column) const {
    const T* const base = k.base + w.kv_head * k.head + column;
    if constexpr (!COPIED) {
      const int key = first + 8 * (lane % (BN / 8));
      return KnownWalk{base + lane / 4 * k.row, k.row, pool_row(key, page_of(w, key))};
    } else {
      return LookedUpWalk{*this, w, base, first + lane / 4};
    }
  }
  struct Values {
    const PagedKeys& keys;
    const WorkTile& w;
    KS_DEVICE const T* row(int key) const {
      return keys.v.base + w.kv_head * keys.v.head + (i64)keys.pool_row(key, keys.page_of(w, key)) * keys.v.row;
    }
  };
  KS_DEVICE Values values(const WorkTile& w) const { return {*this, w}; }
};
