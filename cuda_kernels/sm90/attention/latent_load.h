// Latent attention's warpgroup that loads: queries, and keys that are of T.
#pragma once
#include "sm90/attention/latent_tiles.h"

// The warpgroup that loads: queries, and where pages are. 8 lanes a row of a panel, 16 rows at a time.
struct Producer {
  SharedStorage& storage;
  const Operands& a;
  const Pages& pages;
  const Ring<STAGES> (&k_rings)[2];
  const Ring<1>& q_ring;
  int thread;
  PipelineState<STAGES> state{0, 1};
  PipelineState<1> q_state{0, 1};

  static constexpr int PASSES = 4;  // of 16 rows
  KS_DEVICE int row(int i) const { return thread / 8 + 16 * i; }
  // A row's chunks, one of each panel of part N; zeros where it is not `there`.
  template<int N, int BYTES = PANEL_BYTES> KS_DEVICE void copy(u32 tile, int i, const T* from, bool there) const {
    const u32 to = tile + row(i) * 128 + (thread ^ row(i)) % 8 * 16;
#pragma unroll
    for (int n = 0; n < part_panels<N>; n++) async_copy(to + panel_of<N>(n) * BYTES, from + 64 * panel_of<N>(n), there);
  }

  KS_DEVICE void load_queries(const Piece& piece, const Rows& rows) {
    q_ring.wait_empty(q_state);
#pragma unroll 1
    for (int i = 0; i < ROWS / 16; i++) {
      const bool there = row(i) < rows.count;
      const int r = there ? row(i) : 0;
      const T* const from = a.q.at<Config::Q_VIEW>(piece.entry, rows.head(r), 0, piece.sequence.q_first)
                          + (i64)rows.query(r) * a.q.row + 8 * (thread % 8);
      copy<0, QUERY_PANEL_BYTES>(shared_address(storage.q), i, from, there);
      copy<1, QUERY_PANEL_BYTES>(shared_address(storage.q), i, from, there);
    }
    async_copies_arrive(q_ring.full(q_state));
    q_state.advance();
  }

  // The page of a key. Of keys that are not seen page 0.
  KS_DEVICE int look_up(int entry, int key, int limit) const {
    return Config::KV_VIEW == PAGED && key < limit ? pages.table[entry * pages.table_row + pages.size.quotient(key)] : 0;
  }
  // Where its row lies, in elements from the item's first.
  KS_DEVICE i64 place(int page, int key, int limit) const {
    if (Config::KV_VIEW != PAGED) return key < limit ? (i64)key * a.k.row : 0;
    return page * a.k.batch + (key < limit ? (i64)(key - pages.size.quotient(key) * pages.size.d) * a.k.row : 0);
  }
};

// Keys as they are: tiles by TMA, or rows by cp.async.
struct CopyingProducer : Producer {
  const TensorMap& k_map;  // element, row, head, page or entry
  bool boxes;              // whether a tile of rows is a box of it

  template<int N> KS_DEVICE void load_part(const int (&page)[PASSES], const T* base, int tile, int limit) const {
    const Ring<STAGES>& ring = k_rings[N];
    ring.wait_empty(state);
#pragma unroll
    for (int i = 0; i < PASSES; i++)
      copy<N>(shared_address(storage.k[state.stage]), i, base + place(page[i], tile * BN + row(i), limit), tile * BN + row(i) < limit);
    async_copies_arrive(ring.full(state));
  }
  template<int N> KS_DEVICE void load_box(int row, int head, int at) const {
    const Ring<STAGES>& ring = k_rings[N];
    const u32 full = ring.full(state);
    ring.wait_empty(state);
    if (thread) {
      barrier_arrive(full);  // counts on as many threads as copy rows
    } else {
      barrier_arrive_expect_tx(full, part_panels<N> * PANEL_BYTES);
#pragma unroll
      for (int n = 0; n < part_panels<N>; n++) {
        const int p = panel_of<N>(n);
        tma_load(shared_address(storage.k[state.stage]) + p * PANEL_BYTES, k_map, full, 64 * p, row, head, at);
      }
    }
  }
  KS_DEVICE void load_keys(const int (&page)[PASSES], const T* base, const Piece& piece, int tile, int limit, bool boxed) {
    if (boxed) {
      int row = tile * BN, entry = Config::KV_VIEW == PACKED ? 0 : piece.entry;
      if (Config::KV_VIEW == PACKED) row += piece.sequence.k_first;
      if (Config::KV_VIEW == PAGED) row -= pages.size.quotient(row) * pages.size.d, entry = page[0];  // of the first thread the tile's
      load_box<0>(row, piece.kv_head, entry);
      load_box<1>(row, piece.kv_head, entry);
    } else {
      load_part<0>(page, base, tile, limit);
      load_part<1>(page, base, tile, limit);
    }
    state.advance();
  }
  KS_DEVICE void run(const Pieces& pieces) {
    bool more = true;
#pragma unroll 1
    while (more) {
      const Piece& piece = pieces.now();
      const Rows rows = pieces.rows();
      const int limit = rows.most(), boxed = boxed_tiles(rows, boxes);
      const T* const base = (const T*)a.k.at<Config::KV_VIEW>(piece.entry, piece.kv_head, 0, piece.sequence.k_first);
      int page[PASSES];  // looked up while the tile before is loaded
      auto look_up_rows = [&](int tile) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) page[i] = look_up(piece.entry, tile * BN + row(i), limit);
      };
      look_up_rows(piece.begin);
      load_queries(piece, rows);
#pragma unroll 1
      for (int tile = piece.begin; tile < piece.end; tile++) {
        load_keys(page, base + 8 * (thread % 8), piece, tile, limit, tile < boxed);
        look_up_rows(tile + 1);  // beyond the limit nothing
      }
      more = pieces.next();
    }
    async_copies_wait();
  }
};
