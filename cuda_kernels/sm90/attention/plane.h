// A warp's 16 rows of a bias by a block of keys, in shared memory of the warp's own: copied while the products of a block are made,
// so that none waits for them, and read where accumulators are. Rows lie PITCH bytes apart, an odd number of 16, so that eight of
// them begin in other banks.
#pragma once
#include "sm90/attention/softmax.h"
#include "sm90/attention/tiles.h"

template<class X, int BN> struct PlaneRows {
  static constexpr int SIZE = sizeof(X), PITCH = BN * SIZE + 16, BYTES = 16 * PITCH;
  static constexpr int PER = 16 / SIZE, CHUNKS = BN / PER, AT_ONCE = WARP / CHUNKS;  // of a copy: elements, those of a row, rows of a warp's
  static_assert(SIZE == 2 || SIZE == 4, "as eight() reads them");
  static_assert(16 % AT_ONCE == 0 && GROUP_HEADS == 1, "a copy takes whole rows of one head");

  int from;       // where rows are wide, the lane's 16 bytes of its first row, from key 0 on, in units of 16 bytes from the planes' base
  u32 to;         // where they go; odd where not all rows lie at multiples of 16 bytes
  u32 at;         // where the lane's first elements of a block are

  PlaneRows() = default;
  // Of a plane's row `first` and those behind it, in shared memory from `rows` on.
  KS_DEVICE PlaneRows(const Planes<X>& planes, const Plane<X>& plane, int first, u32 rows, int lane) {
    from = (int)((&plane.at(0, first + lane / CHUNKS, lane % CHUNKS * PER) - planes.base) / PER);
    const bool wide = plane.column == 1 && (((u64)planes.base | (u64)plane.base | (u64)(i64)plane.row * SIZE) & 15) == 0;
    to = rows + lane / CHUNKS * PITCH + lane % CHUNKS * 16 + !wide;
    at = rows + (SIZE == 2 ? lane % 16 * PITCH + lane / 16 * 16 : lane / 4 * PITCH + lane % 4 * 2 * SIZE);
  }

  // The keys from `key` on. What is behind the last row or key is not read: zeros come in its place, as the references of a warp's other rows
  // would move with what lay there before. `left`: rows of the sequence from the first on.
  KS_DEVICE void copy(const Planes<X>& plane, const Plane<X>& own, int first, int left, int key, int S_k, int lane) const {
    if (to % 2 == 0) {
      if (AT_ONCE * CHUNKS < WARP && lane >= AT_ONCE * CHUNKS) return;
      const X* x = plane.base + (i64)from * PER + key;
      if (left >= 16 && key + BN <= S_k) {
#pragma unroll
        for (int i = 0; i < 16; i += AT_ONCE, x += AT_ONCE * plane.row) async_copy_bytes(to + i * PITCH, x, 16);
      } else {
        const int there = max_of(min_of(S_k - key - lane % CHUNKS * PER, PER), 0) * SIZE;
#pragma unroll 1
        for (int i = 0; i < 16; i += AT_ONCE, x += AT_ONCE * plane.row)
          async_copy_bytes(to + i * PITCH, x, lane / CHUNKS + i < left ? there : 0);
      }
    } else {
      const u32 rows = to - 1 - (lane / CHUNKS * PITCH + lane % CHUNKS * 16);
#pragma unroll 4
      for (int i = lane; i < 16 * BN; i += WARP) {
        const int r = i / BN, c = i % BN;
        const bool there = r < left && key + c < S_k;
        store(rows + r * PITCH + c * SIZE, there ? own.at(0, first + r, key + c) : X{});
      }
    }
  }

  // Eight elements where an accumulator has eight scores: element i is of the lane's row i/2 % 2, 8 · (i/4) + i % 2 columns behind the first.
  struct Eight {
    typename conditional<SIZE == 4, Pair, u32>::type two[4];
    KS_DEVICE float operator[](int i) const {
      if constexpr (SIZE == 4) return i % 2 ? two[i / 2].y : two[i / 2].x;
      else return i % 2 ? unpacked_high(two[i / 2], X()) : unpacked_low(two[i / 2], X());
    }
  };
  KS_DEVICE Eight eight(int column) const {
    const u32 place = at + column * SIZE;
    Eight x;
    if constexpr (SIZE == 2) ldmatrix(place, x.two);
    else
#pragma unroll
      for (int i = 0; i < 4; i++) x.two[i] = load_pair(place + i % 2 * 8 * PITCH + i / 2 * 8 * SIZE);
    return x;
  }

 private:
  static KS_DEVICE void store(u32 to, float x) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(x) : "memory"); }
  template<class T> static KS_DEVICE void store(u32 to, T x) {
    asm volatile("st.shared.b16 [%0], %1;" :: "r"(to), "h"(*(const unsigned short*)&x) : "memory");
  }
};
