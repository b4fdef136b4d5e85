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

  // Row r of the tile.
  KS_DEVICE const T* query(const Piece& piece, const Rows& rows, int r) const {
    return a.q.at<Config::Q_VIEW>(piece.entry, rows.head(r), 0, piece.sequence.q_first) + (i64)rows.query(r) * a.q.row;
  }
  KS_DEVICE void load_queries(const Piece& piece, const Rows& rows) {
    q_ring.wait_empty(q_state);
#pragma unroll 1
    for (int i = 0; i < ROWS / 16; i++) {
      const bool there = row(i) < rows.count;
      const int r = there ? row(i) : 0;
      const T* const from = query(piece, rows, r) + 8 * (thread % 8);
      copy<0, QUERY_PANEL_BYTES>(shared_address(storage.q), i, from, there);
      copy<1, QUERY_PANEL_BYTES>(shared_address(storage.q), i, from, there);
    }
    async_copies_arrive(q_ring.full(q_state));
    q_state.advance();
  }

  // The rows of a piece's keys in memory, of which LANES threads have every STEP-th one of each tile; of a cluster's tile a block has
  // half. Rows of keys that are not seen, or that lie behind the piece, are not there. Their pages are looked up a tile ahead.
  template<int COUNT, int LANES> struct KeyRows {
    const Producer& producer;
    int entry, limit;
    const char* base;
    int page[COUNT];

    KS_DEVICE KeyRows(const Producer& producer, const Piece& piece, const Rows& rows)
        : producer(producer), entry(piece.entry), limit(min_of(rows.most(), piece.end * BN)),
          base((const char*)producer.a.k.template at<Config::KV_VIEW>(piece.entry, piece.kv_head, 0, piece.sequence.k_first)) {
      look_up(piece.begin);
    }
    KS_DEVICE int row(int i) const {
      constexpr int STEP = BN / CLUSTER / COUNT;
      return producer.thread / LANES + STEP * i + (CLUSTER > 1 ? BN / CLUSTER * cluster_rank() : 0);
    }
    KS_DEVICE int key(int tile, int i) const { return tile * BN + row(i); }
    KS_DEVICE bool there(int tile, int i) const { return key(tile, i) < limit; }
    KS_DEVICE void look_up(int tile) {
      const Pages& pages = producer.pages;
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        page[i] = Config::KV_VIEW == PAGED && there(tile, i) ? pages.table[entry * pages.table_row + pages.size.quotient(key(tile, i))] : 0;
    }
    // Where a row begins, in the page `of`; of one that is not there, a row that is.
    KS_DEVICE const char* at(int tile, int i, int of) const {
      const Pages& pages = producer.pages;
      const Matrices<const KV>& k = producer.a.k;
      const int number = key(tile, i), in_page = Config::KV_VIEW == PAGED ? number - pages.size.quotient(number) * pages.size.d : number;
      const i64 row = there(tile, i) ? (i64)in_page * k.row : 0;
      return base + (Config::KV_VIEW == PAGED ? of * k.batch + row : row) * (int)sizeof(KV);
    }
    KS_DEVICE const char* at(int tile, int i) const { return at(tile, i, page[i]); }
  };
};

// Keys as they are: tiles by TMA, or rows by cp.async.
struct CopyingProducer : Producer {
  const TensorMap& k_map;  // element, row, head, page or entry
  bool boxes;              // whether a tile of rows is a box of it

  typedef KeyRows<PASSES, 8> Keys;

  template<int N> KS_DEVICE void load_part(const Keys& keys, int tile) const {
    const Ring<STAGES>& ring = k_rings[N];
    ring.wait_empty(state);
#pragma unroll
    for (int i = 0; i < PASSES; i++)
      copy<N>(shared_address(storage.k[state.stage]), i, (const T*)keys.at(tile, i) + 8 * (thread % 8), keys.there(tile, i));
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
  KS_DEVICE void load_keys(const Keys& keys, const Piece& piece, int tile, bool boxed) {
    if (!FEW && boxed) {
      int row = tile * BN, entry = Config::KV_VIEW == PACKED ? 0 : piece.entry;
      if (Config::KV_VIEW == PACKED) row += piece.sequence.k_first;
      if (Config::KV_VIEW == PAGED) row -= pages.size.quotient(row) * pages.size.d, entry = keys.page[0];  // of the first thread the tile's
      load_box<0>(row, piece.kv_head, entry);
      load_box<1>(row, piece.kv_head, entry);
    } else {
      load_part<0>(keys, tile);
      load_part<1>(keys, tile);
    }
    state.advance();
  }
  KS_DEVICE void run(const Pieces& pieces) {
    pieces.each([&](const Piece& piece, const Rows& rows) {
      const int boxed = boxed_tiles(rows, boxes);
      Keys keys(*this, piece, rows);
      load_queries(piece, rows);
#pragma unroll 1
      for (int tile = piece.begin; tile < piece.end; tile++) {
        load_keys(keys, piece, tile, tile < boxed);
        keys.look_up(tile + 1);
      }
    });
    async_copies_wait();
  }
};
