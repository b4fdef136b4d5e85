// A warp's 16 rows of a bias or a mask by a block of keys, in shared memory of the warp's own: copied while the products of a block are made,
// so that none waits for them, and read where accumulators are. Rows lie PITCH bytes apart, an odd number of 16, so that eight of
// them begin in other banks.
#pragma once
#include "sm90/attention/tiles.h"

template<class X> struct Two { X x, y; };

template<class X, int BN> struct PlaneRows {
  static constexpr int SIZE = sizeof(X), PITCH = BN * SIZE + 16, BYTES = 16 * PITCH, PER = 16 / SIZE, CHUNKS = BN / PER;
  typedef Planes<X> Plane;

  // Keys from `key` on of rows from `first` on of a tile. What is behind the last row or key is not read, and where rows lie at multiples of
  // 16 bytes zeros come in its place.
  static KS_DEVICE void copy(char* to, const Plane& plane, const WorkTile& w, int first, int key, int S_q, int S_k, int lane) {
    auto row = [&](int r) {
      const int h = w.head + group_head_of(first + r);
      return plane.base + (w.batch * plane.batch + h * plane.head + query_of(first + r) * plane.row + key * plane.column);
    };
    const i64 strides = plane.batch | plane.head | plane.row;
    const int rows = S_q * GROUP_HEADS - first;
    if (plane.column == 1 && (((u64)plane.base | (u64)strides * SIZE) & 15) == 0) {
      constexpr int AT_ONCE = WARP / CHUNKS;  // rows
      const int r = lane / CHUNKS, c = lane % CHUNKS * PER, there = max_of(min_of(S_k - key - c, PER), 0) * SIZE;
      const X* from = row(r) + c;
      const u32 place = shared_address(to) + r * PITCH + c * SIZE;
      if (AT_ONCE * CHUNKS == WARP || r < AT_ONCE)
#pragma unroll
        for (int i = 0; i < 16; i += AT_ONCE) {
          if (GROUP_HEADS > 1) from = row(r + i) + c;
          if (16 % AT_ONCE == 0 || r + i < 16) async_copy_bytes(place + i * PITCH, from, r + i < rows ? there : 0);
          from += AT_ONCE * plane.row;
        }
    } else {
#pragma unroll 4
      for (int i = lane; i < 16 * BN; i += WARP) {
        const int r = i / BN, c = i % BN;
        if (r < rows && key + c < S_k) *(X*)(to + r * PITCH + c * SIZE) = row(r)[c * plane.column];
      }
    }
  }
  // Where a lane's first two elements of its first row are.
  static KS_DEVICE u32 of_lane(u32 rows, int lane) { return rows + lane / 4 * PITCH + lane % 4 * 2 * SIZE; }
  // Of its row r the two that are `column` further.
  static KS_DEVICE Two<X> two(u32 at, int r, int column) {
    const u32 from = at + 8 * r * PITCH + column * SIZE;
    Two<X> x;
    if constexpr (SIZE == 1) {
      unsigned short both;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(both) : "r"(from) : "memory");
      x = {(X)(both & 0xff), (X)(both >> 8)};
    } else if constexpr (SIZE == 2) {
      u32 both;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(from) : "memory");
      x = *(const Two<X>*)&both;
    } else {
      const Pair both = load_pair(from);
      x = {both.x, both.y};
    }
    return x;
  }
};
