// Rows of keys and values on their way to LDS (attention.h): which a wave copies, where they lie, in pages too, and how their chunks are
// permuted. Copies go straight there, 16 bytes a lane. No registers are kept but a lane's two offsets of each operand; places are scalars.
#pragma once
#include "attention/sequences.h"

typedef Config::T T;
constexpr int D = Config::DQK, BN = Config::BN, STAGES = 3, WAVES = 8, ROWS = 32, BM = WAVES * ROWS;
static_assert(D == Config::DV && (D == 64 || D == 128) && BN % 32 == 0 && sizeof(T) == 2, "what the layout is made for");
constexpr int ROW = 2 * D, CHUNKS = D / 8, TILE = BN * ROW, V_RING = STAGES * TILE;
constexpr int COPIED = 1024, COPY_ROWS = COPIED / ROW, PART = 2 * COPY_ROWS;
constexpr bool IN_PAGES = Config::KV_VIEW == PAGED;
static_assert(2 * WAVES * COPIED == TILE, "a wave copies twice a kilobyte of a tile");

// Two times 16 bytes of each lane, from `base + first` and `base + second + 1024`, to LDS from `to` and `to + 1024` on: an
// instruction's offset counts on both sides. The compiler does not know of these loads: else it would have every read of LDS
// wait for them.
KS_DEVICE void copy_straight(unsigned to, const char* base, unsigned first, unsigned second) {
  asm volatile(
      "s_mov_b32 m0, %0\n\ts_nop 0\n\tglobal_load_lds_dwordx4 %1, %3\n\tglobal_load_lds_dwordx4 %2, %3 offset:1024"
      : : "s"(to), "v"(first), "v"(second), "s"(base) : "memory");
}
// The permutation of a row's chunks.
KS_DEVICE int k_permutation(int row) { return D == 128 ? row & 15 : row / 2 & 7; }
KS_DEVICE int v_permutation(int row) { return D == 128 ? (row & 3) * 4 : (row / 2 & 1) * 4; }

// The first row of a wave's part of a tile that has `left` rows; of the last part with rows, where its own has none.
KS_DEVICE int part_row(int left) { return min_of(warp_index() * PART, (left - 1) / PART * PART); }

// Where a wave's part of a tile lies in pages.
struct Place { int page, row; };
// The sequence's row of the block table; `first`: the key that begins the first tile, of `tiles`; `keys`: those from there on.
struct Places {
  const KS_SCALAR int* table;
  FastDivmod size;
  int first, tiles, keys;
  KS_DEVICE Place of(int tile) const {
    if (!IN_PAGES) return {};
    const int begin = min_of(tile, tiles - 1) * BN;  // behind the last tile the table says nothing
    const int key = first + begin + part_row(min_of(keys - begin, BN)), page = size.quotient(key);
    return {table[page], key - page * size.d};
  }
};

// Copies of one operand's tiles, one after the other. A wave copies rows that are neighbours, twice 1024 bytes.
template<bool KEYS> struct Rows {
  const char* base;  // of the next tile, or of page 0; 1024 bytes before it
  i64 step;          // of bytes, to the next tile or page
  int stride;        // of bytes
  unsigned part;     // of a tile, the wave's
  unsigned offset[2];
  // The row of a lane, and where in it its 16 bytes begin.
  static KS_DEVICE int row(int lane, int i) { return (warp_index() * 2 + i) * COPY_ROWS + lane / CHUNKS; }
  static KS_DEVICE int chunk(int lane, int i) {
    const int n = row(lane, i);
    return (lane % CHUNKS ^ (KEYS ? k_permutation(n) : v_permutation(n))) * 16 + (1 - i) * COPIED;
  }
  KS_DEVICE Rows(const T* from, i64 page, int row_stride) : base((const char*)from - COPIED), stride(2 * row_stride) {
    step = IN_PAGES ? 2 * page : (i64)BN * stride, part = warp_index() * 2 * COPIED;
    const int first = IN_PAGES ? part_row(BN) : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) offset[i] = (row(lane(), i) - first) * stride + chunk(lane(), i);
  }
  KS_DEVICE const char* next(Place at) {
    if constexpr (IN_PAGES) return base + at.page * step + (i64)at.row * stride;
    const char* const from = base;
    base += step;
    return from;
  }
  KS_DEVICE void copy(unsigned to, Place at) { copy_straight(to + part, next(at), offset[0], offset[1]); }
  // Of the last tile, which has `left` rows: those beyond are the last.
  KS_DEVICE void copy(unsigned to, Place at, int left) {
    if (left >= BN) return copy(to, at);
    const int l = opaque(lane());
    if (left <= 0) return;
    const int first = IN_PAGES ? part_row(left) : 0;
    copy_straight(to + part, next(at), (min_of(row(l, 0), left - 1) - first) * stride + chunk(l, 0),
                  (min_of(row(l, 1), left - 1) - first) * stride + chunk(l, 1));
  }
};
