// The loop's Output policy: how a thread's part of a warpgroup's 64 rows leaves.
//
//   store(t, o, w, inverse)   writes O times the rows' factors; returns whether the warp stored a NaN that may have to be recomputed
#pragma once
#include "sm90/attention/consumer_thread.h"
#include "sm90/attention/non_finite.h"

// A part of the keys, or few rows: each thread stores its part of its two rows.
struct RowOutput {
  static KS_DEVICE void store_pair(float* to, float x, float y) { *(float2*)to = float2{x, y}; }
  template<class X> static KS_DEVICE void store_pair(X* to, float x, float y) { *(u32*)to = pack2(x, y, X()); }

  static KS_DEVICE bool store(const ConsumerThread& t, const float (&o)[O_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) {
    const int first = t.thread_row(w), end = t.rows_end(w);
    const int column = t.first_column() + t.thread_lane % 4 * 2;
    TO* const to = t.results(w) + column;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (first + 8 * r >= end) break;
      TO* const row = to + t.place_of(t.a.out, first + 8 * r);
#pragma unroll
      for (int c = 0; c < min_of(DV, O_COLUMNS) / 8; c++) {
        if (VALUE_PARTS > 1 && column + 8 * c >= DV) break;
        store_pair(row + 8 * c, o[4 * c + 2 * r] * inverse[r], o[4 * c + 2 * r + 1] * inverse[r]);
      }
    }
    return false;
  }
};

// Parts of the keys in a cluster: each thread leaves its part of its two rows in shared memory, where the rings were, for cluster_merge.h.
struct PartOutput {
  static KS_DEVICE bool store(const ConsumerThread& t, const float (&o)[O_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) {
    const int column = t.first_column() + t.thread_lane % 4 * 2;
    named_barrier_sync(READ, CONSUMERS);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 to = shared_address(t.part_row(t.thread_row(w) - w.row + 8 * r) + column);
#pragma unroll
      for (int c = 0; c < O_COLUMNS / 8; c++) store_pair(to + 32 * c, o[4 * c + 2 * r] * inverse[r], o[4 * c + 2 * r + 1] * inverse[r]);
    }
    return false;
  }
};

// O through shared memory to global, panel by panel, each warp its own 16 rows. TMA does not write rows beyond a dense tensor's last; a
// packed sequence's last rows are stored by the threads, as the next sequence follows them, and so are rows of heads that share keys.
struct PanelOutput {
  template<class X = TO>
  static KS_DEVICE bool store(const ConsumerThread& t, const float (&o)[O_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) {
    u32 most = 0;
    const int row = t.group_row(w) + 16 * t.warp, lane = t.thread_lane;
    const int rows = GROUP_HEADS == 1 && Config::Q_VIEW == PACKED ? w.S_q - row : 16;
    auto store_panel = [&](int c) {
      const int column = t.first_column() + c;
      char* const panel = t.storage.out.warps[t.group * 4 + t.warp] + c / 64 % Config::OUT_STAGES * O_BYTES;
      if (c / 64 % Config::OUT_STAGES == 0) {
        if (lane == 0) tma_store_wait_read<0>();
        warp_barrier();
      }
      const u32 line = shared_address(panel) + lane % 16 * 128;
#pragma unroll
      for (int chunk = 0; chunk < min_of(O_COLUMNS - c, 64) / 8; chunk += 2) {
        const float* const x = o + c / 2 + chunk * 4;
        const uint4 y{pack2(x[0] * inverse[0], x[1] * inverse[0], X()), pack2(x[2] * inverse[1], x[3] * inverse[1], X()),
                      pack2(x[4] * inverse[0], x[5] * inverse[0], X()), pack2(x[6] * inverse[1], x[7] * inverse[1], X())};
        stmatrix(line + ((chunk + lane / 16) ^ lane % 8) * 16, y.x, y.y, y.z, y.w);
        if (RECOMPUTES) most = max_magnitude(most, y);
      }
      async_proxy_fence();
      warp_barrier();
      if (GROUP_HEADS == 1 && (Config::Q_VIEW != PACKED || rows >= 16)) {
        if (lane == 0) {
          tma_store(t.maps.out, shared_address(panel), column, w.q_first + row, w.head, Config::Q_VIEW == PACKED ? 0 : w.batch);
          tma_store_commit();
        }
      } else {
        TO* const to = t.results(w) + column;
#pragma unroll 1
        for (int r = lane / 8; r < rows; r += 4) {
          const uint4 x = *(const uint4*)(panel + r * 128 + (lane ^ r) % 8 * 16);
          if (column + lane % 8 * 8 < DV) *(uint4*)(to + t.place_of(t.a.out, row + r) + lane % 8 * 8) = x;
        }
        warp_barrier();
      }
    };
    if constexpr (E4M3 || HAS_BIAS) {  // whose registers would be spilled
#pragma unroll
      for (int c = 0; c < O_COLUMNS; c += 64) store_panel(c);
    } else {
      each_step<O_COLUMNS, 64>(store_panel);
    }
    return RECOMPUTES && __any_sync(~0u, has_nan(most));
  }
};

// Rows of heads that share keys. Of 16 whole lines leave, where each thread would store 4 bytes of half a sector (a tile of 128 rows of 128
// columns takes 2 µs less, H200); fewer do not wait for shared memory.
struct GroupOutput {
  template<class X = TO>
  static KS_DEVICE bool store(const ConsumerThread& t, const float (&o)[O_COLUMNS / 2], const WorkTile& w, const float (&inverse)[2]) {
    const bool full = t.rows_end(w) - t.group_row(w) - 16 * t.warp >= 16;
    return full ? PanelOutput::store<X>(t, o, w, inverse) : RowOutput::store(t, o, w, inverse);
  }
};

// More than two consumers have no registers for either way.
typedef conditional<(GROUPS <= 2), GroupOutput, RowOutput>::type SharedRowsOutput;
typedef conditional<Config::IN_PARTS, RowOutput, conditional<(GROUP_HEADS > 1), SharedRowsOutput, PanelOutput>::type>::type WholeOutput;
typedef conditional<IN_CLUSTER, PartOutput, WholeOutput>::type Output;
