// Latent attention's warpgroup that loads keys of 8 bits whose rows hold their scales: DV numbers of e4m3, a float32 scale for every
// ROW_SCALES of them, and the other columns in T, as FlashMLA keeps them. A number times its scale is rounded to T on its way to
// shared memory: behind it nothing differs.
//
// Loads go to registers, a tile ahead: shared memory has no place for what is not converted yet. Four lanes a row, 32 rows at a time, 16
// columns of each panel a lane. Eight lanes that store at once have two rows, whose chunks lie in even and in odd places.
// Of a cluster's two blocks, which take the same keys, each has half of a tile's rows, and copies to the other what it made of them.
#pragma once
#include "sm90/attention/latent_load.h"

static_assert(!Config::ROW_SCALES || (Config::ROW_SCALES == 128 && DV == 512 && DQK == DV + 64), "a scale for two panels");

// 16 and 8 bytes, through the read-only path; zeros where they are not `there`.
KS_DEVICE void load_if(u32 (&x)[4], const char* from, bool there) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
               "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from), "r"((int)there));
}
KS_DEVICE float2 load_two_if(const char* from, bool there) {
  float2 x;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
               "@p ld.global.nc.v2.f32 {%0, %1}, [%2];\n}" : "=f"(x.x), "=f"(x.y) : "l"(from), "r"((int)there));
  return x;
}

struct ScaledProducer : Producer {
  static constexpr int PASSES = 2 / CLUSTER;
  // A thread's share of a row: its numbers of four panels, and what is no value.
  struct Numbers { u32 x[OWN][4]; float2 scales; };
  struct Plain { u32 x[2][4]; };

  KS_DEVICE int own_row() const { return thread / 4 + (CLUSTER > 1 ? 32 * cluster_rank() : 0); }
  KS_DEVICE int own_lane() const { return thread % 4; }

  template<int N> KS_DEVICE void load(Numbers& to, const char* row, bool there) const {
    to.scales = load_two_if(row + DV + 8 * N, there);
#pragma unroll
    for (int n = 0; n < OWN; n++) load_if(to.x[n], row + 64 * (OWN * N + n) + 16 * own_lane(), there);
  }
  KS_DEVICE void load(Plain& to, const char* row, bool there) const {
#pragma unroll
    for (int n = 0; n < 2; n++) load_if(to.x[n], row + BEHIND + 32 * own_lane() + 16 * n, there);
  }
  // Where the first chunk of own_row() lies in a panel's tile, and the second.
  KS_DEVICE u32 place_of(int n) const {
    const u32 first = shared_address(storage.k[state.stage]) + own_row() * 128 + (2 * own_lane() ^ own_row() % 8) * 16;
    return first ^ (16 * n);
  }
  KS_DEVICE void put(int panel, int i, int n, const u32 (&x)[4]) const {
    store_four(place_of(n) + panel * PANEL_BYTES + i * 32 * 128, x);
  }
  // Four numbers times their scale, rounded.
  static KS_DEVICE void scale_four(u32 x, float scale, u32& lo, u32& hi) {
    u32 a, b;
    widen<f16>(x, a, b);
    auto pair = [&](u32 y) {
      return Pack<T>::two(to_sum(f16{(unsigned short)y}) * scale, to_sum(f16{(unsigned short)(y >> 16)}) * scale);
    };
    lo = pair(a), hi = pair(b);
  }
  template<int N> KS_DEVICE void store(const Numbers& from, int i) const {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const float scale = n < OWN / 2 ? from.scales.x : from.scales.y;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 to[4];
        scale_four(from.x[n][2 * half], scale, to[0], to[1]);
        scale_four(from.x[n][2 * half + 1], scale, to[2], to[3]);
        put(OWN * N + n, i, half, to);
      }
    }
  }
  template<int N> KS_DEVICE void hand_over() const {
    const u32 full = k_rings[N].full(state);
    async_proxy_fence();
    if (CLUSTER == 1) return barrier_arrive(full);
    constexpr int BYTES = 32 * 128;
    named_barrier_sync(CONVERTED, 128);
    if (thread < part_panels<N>) {
      const u32 half = shared_address(storage.k[state.stage]) + panel_of<N>(thread) * PANEL_BYTES + cluster_rank() * BYTES;
      bulk_copy_to(half, half, BYTES, full, cluster_rank() ^ 1);
    }
    if (thread == 0) barrier_arrive_expect_tx(full, part_panels<N> * BYTES);
    else barrier_arrive(full);
  }

  KS_DEVICE void run(const Pieces& pieces) {
    pieces.each([&](const Piece& piece, const Rows& rows) {
      KeyRows<PASSES, 4> keys(*this, piece, rows);
      int now[PASSES];  // pages
      Numbers first[PASSES], second[PASSES];
      Plain plain[PASSES];
      auto load_first = [&](int tile, int i) { load<0>(first[i], keys.at(tile, i), keys.there(tile, i)); };
      auto load_second = [&](int tile, int i) { load<1>(second[i], keys.at(tile, i), keys.there(tile, i)); };
#pragma unroll
      for (int i = 0; i < PASSES; i++) load_first(piece.begin, i);
#pragma unroll
      for (int i = 0; i < PASSES; i++) load_second(piece.begin, i);
      load_queries(piece, rows);
#pragma unroll 1
      for (int tile = piece.begin; tile < piece.end; tile++) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) now[i] = keys.page[i];
        keys.look_up(tile + 1);
        k_rings[0].wait_empty(state);
        store<0>(first[0], 0);
#pragma unroll
        for (int i = 0; i < PASSES; i++) load(plain[i], keys.at(tile, i, now[i]), keys.there(tile, i));
        if constexpr (PASSES > 1) store<0>(first[PASSES - 1], PASSES - 1);
        hand_over<0>();
        load_first(tile + 1, 0);
        k_rings[1].wait_empty(state);
        store<1>(second[0], 0);
        if constexpr (PASSES > 1) {
          load_first(tile + 1, PASSES - 1);
          store<1>(second[PASSES - 1], PASSES - 1);
        }
        load_second(tile + 1, 0);
#pragma unroll
        for (int i = 0; i < PASSES; i++)
#pragma unroll
          for (int n = 0; n < 2; n++) put(PANELS - 1, i, n, plain[i].x[n]);
        hand_over<1>();
        if constexpr (PASSES > 1) load_second(tile + 1, PASSES - 1);
        state.advance();
      }
    });
    async_copies_wait();
  }
};
