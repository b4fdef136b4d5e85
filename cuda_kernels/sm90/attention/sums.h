// Products of e4m3 sum few bits (about 13): what a tile's P·V has summed goes to sums in shared memory every SUM_BLOCKS blocks of
// keys, and O starts anew. Of float32 these keep 24 bits, 16 behind the point: four numbers lie in three words, the fourth one's
// bytes below the others'. A thread has its own; neighbouring threads' are 16 bytes apart. A warp's results leave through the same
// memory. Products of 16 bits have none.
#pragma once
#include "sm90/attention/block.h"

struct NoSums {
  KS_DEVICE NoSums(SharedStorage&, int, int) {}
  KS_DEVICE void begin() {}
  template<int N> KS_DEVICE void count(float (&)[N]) {}
  template<int N> KS_DEVICE void take(float (&)[N]) {}
  template<int N> KS_DEVICE void add_to(float (&)[N]) const {}
  KS_DEVICE void rescale(const float (&)[2]) const {}
};

// Three words to four numbers, and back.
KS_DEVICE void unpack_24(const u32* words, float* x) {
#pragma unroll
  for (int i = 0; i < 3; i++) x[i] = __uint_as_float(words[i] & ~0xffu);
  x[3] = __uint_as_float(__byte_perm(__byte_perm(words[0], words[1], 0x0400), words[2], 0x4210) & ~0xffu);
}
KS_DEVICE void pack_24(const float* x, u32* words) {
  u32 bits[4];
#pragma unroll
  for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(x[i]) + 0x80;
#pragma unroll
  for (int i = 0; i < 3; i++) words[i] = __byte_perm(bits[i], bits[3], 0x3215 + i);
}

struct SharedSums {
  static constexpr int STEP = WARP * 16;
  SharedStorage& storage;
  int warp, lane;
  int blocks = 0;  // of the tile so far

  KS_DEVICE SharedSums(SharedStorage& storage, int warp, int lane) : storage(storage), warp(warp), lane(lane) {}
  // Computed where it is used: kept, it would be spilled.
  KS_DEVICE u32 place() const { return shared_address(storage.out.warps[opaque(warp)]) + lane * 16; }
  KS_DEVICE void begin() { blocks = 0; }
  KS_DEVICE bool any() const { return blocks >= Config::SUM_BLOCKS; }
  // A block was summed.
  template<int N> KS_DEVICE void count(float (&o)[N]) {
    if ((blocks + 1) % Config::SUM_BLOCKS == 0) move(o);
    blocks++;
  }
  // At once, for who needs O's registers: as if as many blocks had been summed as that takes.
  template<int N> KS_DEVICE void take(float (&o)[N]) {
    move(o);
    blocks = (blocks / Config::SUM_BLOCKS + 1) * Config::SUM_BLOCKS;
  }
  template<int N> KS_DEVICE void move(float (&o)[N]) const {
    add_to(o);
    if (lane == 0) tma_store_wait_read<0>();
    warp_barrier();
#pragma unroll
    for (int i = 0; i < N; i += 16) {
      store(i, o + i);
#pragma unroll
      for (int j = 0; j < 16; j++) o[i + j] = 0.f;
    }
  }
  template<int N> KS_DEVICE void add_to(float (&o)[N]) const {
    if (!any()) return;
#pragma unroll
    for (int i = 0; i < N; i += 16) {
      float x[16];
      load(i, x);
#pragma unroll
      for (int j = 0; j < 16; j++) o[i + j] += x[j];
    }
    if constexpr (N > 64) warp_barrier();  // what storing O needs is not read before: no register is left to keep it in
  }
  KS_DEVICE void rescale(const float (&by)[2]) const {
    if (!any()) return;
#pragma unroll 1
    for (int i = 0; i < O_COLUMNS / 2; i += 16) {
      float x[16];
      load(i, x);
      scale_rows(x, by);
      store(i, x);
    }
  }
  KS_DEVICE void load(int i, float (&x)[16]) const {
    u32 words[12];
    const u32 from = place();
#pragma unroll
    for (int j = 0; j < 3; j++) load_fragment(from + (i / 16 * 3 + j) * STEP, *(u32(*)[4])(words + 4 * j));
#pragma unroll
    for (int j = 0; j < 4; j++) unpack_24(words + 3 * j, x + 4 * j);
  }
  KS_DEVICE void store(int i, const float* x) const {
    u32 words[12];
    const u32 to = place();
#pragma unroll
    for (int j = 0; j < 4; j++) pack_24(x + 4 * j, words + 3 * j);
#pragma unroll
    for (int j = 0; j < 3; j++) store_fragment(to + (i / 16 * 3 + j) * STEP, *(u32(*)[4])(words + 4 * j));
  }
};
typedef conditional<(Config::SUM_BLOCKS > 0), SharedSums, NoSums>::type Sums;
