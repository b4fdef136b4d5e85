// Where keys and values lie: the loop's Keys policy, an argument of the kernel. It says how blocks of BN keys lie in shared memory, how
// the producer brings them there, and where single rows are in global memory, which what is rare reads.
//
// A policy is a structure with
//   Block<COLUMNS>          how a block of K or V lies in shared memory: see PanelBlock
//   Loader                  the producer's part, of Loader::THREADS threads of a warp; shared memory of its own: Memory. It has
//     leads()                 whether this thread issues: one does
//     agree(more)             what the thread that leads knows, known to all
//     begin(w)                a work tile is known
//     find(w, block, first)   before K of a block (`first`: of a tile): its Place, which its V is loaded from, too
//     load<COLUMNS>(…)        issues a block's boxes, from what boxes(block, place) read ahead
//   key_rows(w, …)          a walk over a block's rows of K, eight on at each step
//   values(w)               a view of V, by row
#pragma once
#include "sm90/attention/tiles.h"
#include "sm90/pipeline.h"

// A block of BN rows: panels of ROW bytes of columns, one after the other. EIGHT_ROWS, PANEL: bytes from eight rows to the next eight,
// from a panel to the next.
template<int BN, int COLUMNS, int SIZE> struct PanelBlock {
  static constexpr int ROW = panel_row<COLUMNS, SIZE>, PANEL = BN * ROW, EIGHT_ROWS = 8 * ROW;
  // The row of which the block's i-th 16 bytes are.
  static KS_DEVICE int row_of(int i) { return i / (ROW / 16) % BN; }
};

// A walk over rows that lie `step` elements apart. By hand, so that the compiler does not compute all addresses ahead and keep them.
template<class T> struct StridedWalk {
  const T* row;
  i64 step;
  KS_DEVICE StridedWalk from(int column) const { return {row + column, step}; }
  KS_DEVICE const T* at(int) const { return row; }
  KS_DEVICE void next() { asm volatile("add.s64 %0, %0, %1;" : "+l"(row) : "l"(step * (i64)sizeof(T))); }
};

// Keys and values that are rows of a matrix for each head of each entry of the batch, or of each head, one sequence after the other.
template<class T, int BN> struct RowKeys {
  Matrices<const T> k, v;
  template<int COLUMNS> using Block = PanelBlock<BN, COLUMNS, sizeof(T)>;
  struct Memory {};
  struct Place {};
  struct Boxes {};

  struct Loader {
    static constexpr int THREADS = 1;
    KS_DEVICE Loader(const RowKeys&, Memory&) {}
    KS_DEVICE bool leads() const { return true; }
    KS_DEVICE bool agree(bool more) const { return more; }
    KS_DEVICE void begin(const WorkTile&) {}
    KS_DEVICE Place find(const WorkTile&, int, bool) { return {}; }
    KS_DEVICE Boxes boxes(int, Place) const { return {}; }
    template<int COLUMNS>
    KS_DEVICE void load(u32 to, const TensorMap& map, u32 barrier, const WorkTile& w, int block, const Boxes&) const {
      tile_load<BN, COLUMNS, sizeof(T)>(to, map, barrier, w.k_first + block * BN, w.kv_head, KS_KV_VIEW == PACKED ? 0 : w.batch);
    }
  };

  // Of the lane's key in eight, from `column` on.
  KS_DEVICE StridedWalk<T> key_rows(const WorkTile& w, int first, int lane, int column) const {
    const T* const rows = k.template at<KS_KV_VIEW>(w.batch, w.kv_head, 1, w.k_first);
    return {rows + (i64)(first + lane / 4) * k.row + column, (i64)8 * k.row};
  }
  KS_DEVICE StridedView<const T> values(const WorkTile& w) const {
    return {v.template at<KS_KV_VIEW>(w.batch, w.kv_head, 1, w.k_first), v.row};
  }
};
