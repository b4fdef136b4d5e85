// The groups of a grouped GEMM, divided along M, N or K (GROUPED) by ends in device memory, and which tile is in which.
//
// Along M the tiles of group g take slots of BM rows, from number begin(g) / BM + g on: as many as its rows can need, so that a
// tile's group is found by halving, without a sum over the groups before. A group has at most one slot of no rows. So along N.
// Along K each group has a C of its own.
// Of a list (BY_LIST) each group has an M, N and K of its own, row strides of its own, and A, B and C at listed addresses; its tiles are
// counted from the first group on, by a block from where its last tile was.
// Along M each row may say which row of A it is (GATHERED), which row of C it goes to (SCATTERED), and what it is multiplied by (FACTORS).
#pragma once
#include "generated/config.h"
#include "tile/tile.h"

enum { ALONG_M = 1, ALONG_N = 2, ALONG_K = 3, BY_LIST = 4 };
enum { OF_M, OF_N, OF_K, ROW_OF_A, ROW_OF_B, ROW_OF_C, LISTED };  // what a list's table has of a group

// A tile's group, the tile's place in it, and the group's part of the axis.
struct GroupTile { int group, m, n, begin, size; };

// An argument of the kernel, passed whole.
struct Groups {
  const int* ends;  // of a list: its table, LISTED numbers a group
  int count, capacity;

  // Where group g begins; what ends beyond the capacity is cut off there.
  KS_DEVICE int begin(int g) const {
    if (g == 0) return 0;
    const int end = ((const int KS_GLOBAL*)ends)[g - 1];
    return end < 0 ? 0 : min_of(end, capacity);
  }
  KS_DEVICE int size(int g) const {
    const int n = begin(g + 1) - begin(g);
    return n < 0 ? 0 : n;
  }
  template<int B>
  KS_DEVICE int first_slot(int g) const { return begin(g) / B + g; }

  // The last group whose slots begin at or before `slot`.
  template<int B>
  KS_DEVICE int group_of(int slot) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_slot<B>(middle) <= slot) low = middle;
      else high = middle;
    }
    return low;
  }

  KS_DEVICE int of_list(int g, int what) const { return ((const int KS_GLOBAL*)ends)[LISTED * g + what]; }
  template<int BM, int BN>
  KS_DEVICE unsigned tiles_of_list(int g) const {
    return (unsigned)divide_up(of_list(g, OF_M), BM) * divide_up(of_list(g, OF_N), BN);
  }
  // The group of tile t and that group's first tile, from a group on whose tiles begin at or before t. Groups are passed over by
  // EIGHT, whose extents are loaded together.
  template<int BM, int BN>
  KS_DEVICE void find(unsigned t, int& group, unsigned& first) const {
    constexpr int EIGHT = 8;
    while (group + EIGHT < count) {
      unsigned tiles = 0;
#pragma unroll
      for (int i = 0; i < EIGHT; i++) tiles += tiles_of_list<BM, BN>(group + i);
      if (t < first + tiles) break;
      group += EIGHT, first += tiles;
    }
    for (; group + 1 < count; group++) {
      const unsigned tiles = tiles_of_list<BM, BN>(group);
      if (t < first + tiles) break;
      first += tiles;
    }
  }

  // tiles_m, tiles_n: of a whole matrix; that of the divided axis is not looked at.
  template<int BM, int BN>
  KS_DEVICE GroupTile tile(unsigned t, int tiles_m, int tiles_n) const {
    constexpr bool BY_ROWS = Config::GROUPED == ALONG_M;
    if (Config::GROUPED == ALONG_K) {
      const unsigned strip = t / tiles_m, group = strip / tiles_n;
      return {(int)group, (int)(t - strip * tiles_m), (int)(strip - group * tiles_n), begin(group), size(group)};
    }
    constexpr int B = BY_ROWS ? BM : BN;
    const unsigned across = BY_ROWS ? tiles_n : tiles_m;
    const int slot = t / across, g = group_of<B>(slot), first = first_slot<B>(g), next = first_slot<B>(g + 1);
    if (slot >= next) return {g, 0, 0, 0, 0};  // after the last group's
    const unsigned in_group = t - first * across, slots = next - first;
    if (BY_ROWS) return {g, (int)(in_group % slots), (int)(in_group / slots), begin(g), size(g)};
    return {g, (int)(in_group % across), (int)(in_group / across), begin(g), size(g)};
  }
};

// Of rows of the product; an argument of the kernel, passed whole. Unchecked indices count as the nearest row.
struct RowIndices {
  const int *a, *c;
  const float* factors;
  int a_rows, c_rows;

  KS_DEVICE int row_of_a(int i) const { return Config::GATHERED ? clamped(((const int KS_GLOBAL*)a)[i], a_rows) : i; }
  KS_DEVICE int row_of_c(int i) const { return Config::SCATTERED ? clamped(((const int KS_GLOBAL*)c)[i], c_rows) : i; }
  KS_DEVICE float factor(int i) const { return ((const float KS_GLOBAL*)factors)[i]; }
  static KS_DEVICE int clamped(int row, int rows) { return max_of(min_of(row, rows - 1), 0); }
};

// Rows of a group, from `first` on, as its indices say where they lie; what is behind its last row is not looked up.
template<class T, bool OF_A> struct IndexedRows {
  StridedView<T> base;
  const RowIndices& indices;
  int first, last;
  KS_DEVICE T* row(int i) const {
    const int at = first + min_of(i, last);
    return base.row(OF_A ? indices.row_of_a(at) : indices.row_of_c(at));
  }
  template<int STEP> KS_DEVICE RowByRow<IndexedRows, T, STEP> walk(int i) const { return {*this, row(i), i}; }
};
