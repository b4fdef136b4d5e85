// Where keys and values lie: the loop's Keys policy, an argument of the kernel. It says how the producer brings
// blocks of BN keys to shared memory, and where single rows are in global memory, which what is rare reads.
//
// A policy is a structure with
//   Loader                  the producer's part, of Loader::THREADS threads of a warp; shared memory of its own: Memory. It has
//     leads()                 whether this thread issues: one does
//     agree(more), number(t)  what the thread that leads knows, known to all; of a number the others have a negative one
//     begin(w)                a work tile is known
//     find(w, block, first, before)   before K of a block (`first`: of a tile), behind the one at `before`: its Place, and later its V's
//     load<Block>(…)          issues a block's boxes, from what boxes(w, block, place) read ahead
//   COPIED                  whether threads copy rows instead, as no box has them: the producer's warp half of K's, by copy_keys(…), three others the rest
//                           (row_copying.h); init(memory) sets up its barriers, and stop(stage) tells those that there is no more. A
//                           fence orders products behind what was copied.
//   key_rows(w, …)          a walk over a block's rows of K, eight on at each step
//   values(w)               a view of V, by row
#pragma once
#include "sm90/attention/tiles.h"
#include "sm90/pipeline.h"

// How a block of BN rows lies in shared memory: panels of ROW bytes of columns, one after the other. EIGHT_ROWS, PANEL: bytes from eight
// rows to the next eight, from a panel to the next.
template<int BN, int WIDTH, int SIZE> struct PanelsApart {
  static constexpr bool TOGETHER = false;
  static constexpr int COLUMNS = WIDTH, ROW = panel_row<COLUMNS, SIZE>, PANELS = divide_up(COLUMNS * SIZE, ROW);
  static constexpr int EIGHT_ROWS = 8 * ROW, PANEL = BN * ROW;
  // The row of which the block's i-th 16 bytes are.
  static KS_DEVICE int row_of(int i) { return i / (ROW / 16) % BN; }
};
// Eight rows of each panel, then the next eight: so one box brings rows of all panels.
template<int BN, int WIDTH, int SIZE> struct PanelsTogether {
  static constexpr bool TOGETHER = true;
  static constexpr int COLUMNS = WIDTH, ROW = panel_row<COLUMNS, SIZE>, PANELS = COLUMNS * SIZE / ROW;
  static constexpr int PANEL = 8 * ROW, EIGHT_ROWS = PANELS * PANEL;
  static_assert(COLUMNS * SIZE % ROW == 0, "whole panels");
  static KS_DEVICE int row_of(int i) { return i / (EIGHT_ROWS / 16) * 8 + i / (ROW / 16) % 8; }
};

// A walk over rows that lie `step` elements apart. By hand, so that the compiler does not compute all addresses ahead and keep them.
template<class T> struct StridedWalk {
  const T* row;
  i64 step;
  KS_DEVICE StridedWalk from(int column) const { return {row + column, step}; }
  KS_DEVICE const T* at(int) const { return row; }
  KS_DEVICE void next() { asm volatile("add.s64 %0, %0, %1;" : "+l"(row) : "l"(step * (i64)sizeof(T))); }
};

// The threads of a Loader: one, or a warp.
template<bool BY_WARP> struct Agreement {
  static constexpr int THREADS = 1;
  KS_DEVICE bool leads() const { return true; }
  KS_DEVICE bool agree(bool more) const { return more; }
  KS_DEVICE int number(int t) const { return t; }
};
template<> struct Agreement<true> {
  static constexpr int THREADS = WARP;
  KS_DEVICE bool leads() const { return elected(); }
  KS_DEVICE bool agree(bool more) const {
    more = __any_sync(~0u, more);
    warp_barrier();  // the tile is written
    return more;
  }
  KS_DEVICE int number(int t) const { return __reduce_max_sync(~0u, t); }
};

// Keys and values that are rows of a matrix for each head of each entry of the batch, or of each head, one sequence after the other.
template<class T, int BN> struct RowKeys {
  Matrices<const T> k, v;
  static constexpr bool COPIED = false;
  struct Memory {};
  static KS_DEVICE void init(Memory&) {}
  struct Place {};
  struct Boxes {};

  struct Loader : Agreement<BY_WARP> {
    KS_DEVICE Loader(const RowKeys&, Memory&) {}
    KS_DEVICE void begin(const WorkTile&) {}
    KS_DEVICE Place find(const WorkTile&, int, bool, Place) { return {}; }
    KS_DEVICE Boxes boxes(const WorkTile&, int, Place) const { return {}; }
    template<class Block>
    KS_DEVICE void load(u32 to, const TensorMap& map, u32 barrier, const WorkTile& w, int block, const Boxes&) const {
      tile_load<BN, Block::COLUMNS, sizeof(T)>(to, map, barrier, w.k_first + block * BN, w.kv_head, Config::KV_VIEW == PACKED ? 0 : w.batch);
    }
    template<class Block, int WIDTH> KS_DEVICE void copy_keys(u32, u32, int, const WorkTile&, Place) const {}
    KS_DEVICE void stop(int) const {}
  };

  // Of the lane's key in eight, from `column` on.
  KS_DEVICE StridedWalk<T> key_rows(const WorkTile& w, int first, int lane, int column) const {
    const T* const rows = k.template at<Config::KV_VIEW>(w.batch, w.kv_head, 1, w.k_first);
    return {rows + (i64)(first + lane / 4) * k.row + column, (i64)8 * k.row};
  }
  KS_DEVICE StridedView<const T> values(const WorkTile& w) const {
    return {v.template at<Config::KV_VIEW>(w.batch, w.kv_head, 1, w.k_first), v.row};
  }
};
