// Products of few rows with tiles of keys of T, by wgmma (latent_few.h).
#pragma once
#include "sm90/attention/finite.h"
#include "sm90/attention/latent_tiles.h"
#include "sm90/attention/softmax.h"

struct TileProducts : FewThread {
  u32 parity = 0;

  struct Units {};
  KS_DEVICE explicit TileProducts(const FewThread& thread) : FewThread(thread) {}
  KS_DEVICE PipelineState<STAGES> state() const { return {own, parity}; }
  KS_DEVICE int key(int half) const { return 16 * warp + thread_lane / 4 + 8 * half; }

  KS_DEVICE void make_scores(float (&s)[8]) const {
    const u32 x = uniform(descriptor_k_major(shared_address(storage.k[own]))), y = uniform(descriptor_k_major(shared_address(storage.q)));
#pragma unroll
    for (int part = 0; part < 2; part++) k_rings[part].wait_full(state());
    async_proxy_fence();  // what cp.async wrote comes before what wgmma reads
    wgmma_fence();
    multiply_ss<T, 16, DQK / 16, PANEL_BYTES, QUERY_PANEL_BYTES>(s, x, y, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // Sets what is not finite of a tile's values from key `from` on to zero: not all rows see them.
  KS_DEVICE void filter(int from) const {
#pragma unroll 1
    for (int i = 8 * max_of(from, 0) + WARP * warp + thread_lane; i < PANEL_BYTES / 16; i += 4 * WARP)
#pragma unroll
      for (int n = 0; n < VALUES; n++) {
        uint4& x = ((uint4*)(storage.k[own] + n * PANEL_BYTES))[i];
        x = finite_part<T>(x);
      }
  }
  KS_DEVICE void multiply(float (&o)[VALUES][8]) const {
    const u32 p = uniform(descriptor_k_major(shared_address(storage.p[own])));
    const u32 v = uniform(descriptor_mn_major(shared_address(storage.k[own]), PANEL_BYTES));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < VALUES; n++)
      multiply_ss<T, 16, BN / 16, 4 * 2048, 4 * 32, 2048, 32, 1, 0>(o[n], advanced(v, n * PANEL_BYTES), p, true);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < VALUES; n++) pin(o[n]);
  }

  KS_DEVICE void put_weights(const float (&s)[8], const Units&) const {
    // Pᵀ lies along keys: fragments are stored transposed.
    const int r = thread_lane % 8, place = thread_lane / 8;
    stmatrix_transposed(shared_address(storage.p[own]) + (8 * (place / 2) + r) * 128 + ((2 * warp + place % 2) ^ r) * 16,
                        pack2(s[0], s[1], T()), pack2(s[2], s[3], T()), pack2(s[4], s[5], T()), pack2(s[6], s[7], T()));
    async_proxy_fence();
  }
  KS_DEVICE void release() {
    if (warp == 0 && thread_lane == 0)
#pragma unroll
      for (int part = 0; part < 2; part++) barrier_arrive(k_rings[part].empty(state()));
    parity ^= 1;
  }
  // Weights are what they are: their units are 1.
  static KS_DEVICE void begin(Units&) {}
  KS_DEVICE void tell_units(int) const {}
  KS_DEVICE float raise_units(Units&, int) const { return 1.f; }
  KS_DEVICE float unit(const Units&) const { return 1.f; }
  // A row's columns of this lane.
  template<class X> KS_DEVICE void put(X* row, const float (&o)[VALUES][8], int first, float factor) const {
#pragma unroll
    for (int n = 0; n < VALUES; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) row[64 * n + key(h)] = convert<X>(o[n][first + 2 * h] * factor);
  }
};
