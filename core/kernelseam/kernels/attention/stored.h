// Keys and values that are stored in 8 bits, and what their numbers are multiplied by.
//
// A head's scales (HEAD_SCALES): k's is a factor of its scores, v's of its result. Those of blocks of keys (BLOCK_SCALES): a
// key's product is multiplied by k's, and its weight, once it is counted in the sum l, by v's. Weights are rounded to T, whose
// range may be small: they are multiplied by scale/2^unit, 2^unit being the least power of 2 above all scales met so far, and o is
// counted in 2^unit, as it is in the running maximum.
//
// Constants: KS_KV, the element type of keys and values in memory; KS_KV_SCALES, one of the words below.
#pragma once
#include "attention/sequences.h"

enum { NO_SCALES, HEAD_SCALES, BLOCK_SCALES };
typedef KS_KV KV;

// The scales of k or of v; strides in elements. Of paged keys a page stands for the batch.
struct Scales {
  const float* base;
  i64 batch;
  int head, block;
  KS_DEVICE Scales of(int h) const { return {base + (i64)h * head, batch, head, block}; }
  // Of a head's.
  KS_DEVICE float at(int b, int n) const { return base[b * batch + (i64)n * block]; }
};

// `block`: keys that share a scale.
struct StoredScales {
  Scales k, v;
  Divider block;
  KS_DEVICE StoredScales of(int head) const { return {k.of(head), v.of(head), block}; }
  // Of a head's: what all keys of an entry are multiplied by.
  KS_DEVICE float of_keys(int batch) const { return KS_KV_SCALES == HEAD_SCALES ? k.at(batch, 0) : 1.f; }
  KS_DEVICE float of_values(int batch) const { return KS_KV_SCALES == HEAD_SCALES ? v.at(batch, 0) : 1.f; }
};

// The row of a key where its blocks are counted from, and the batch or the page of that row.
struct ScalePlace { int batch, row; };

// A scale for each key of a ring's tiles, KEYS each, by THREADS threads (WARP: by each warp its own). They are loaded when a tile
// is fetched and stored a tile later, so that nobody waits for them.
template<int KEYS, int THREADS> struct ScaleRing {
  static constexpr int EACH = (KEYS + THREADS - 1) / THREADS, STAGE = 2 * KEYS;
  float* const base;
  float k[EACH], v[EACH];
  int loaded = -1;  // the stage of what was loaded

  KS_DEVICE explicit ScaleRing(char* memory) : base((float*)memory) {}
  static KS_DEVICE int me() { return THREADS == WARP ? lane() : thread_index(); }
  // Of a head's; place(i): where the scales of key i·THREADS + me() of the tile are.
  template<class Place> KS_DEVICE void fetch(int stage, const StoredScales& scales, Place place) {
    if constexpr (KS_KV_SCALES == BLOCK_SCALES) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (KEYS % THREADS && i * THREADS + me() >= KEYS) break;
        const ScalePlace at = place(i);
        const int n = scales.block.quotient(at.row);
        k[i] = scales.k.at(at.batch, n), v[i] = scales.v.at(at.batch, n);
      }
      loaded = stage;
    }
  }
  // Before a barrier. Never while another thread may read that stage.
  KS_DEVICE void land() {
    if constexpr (KS_KV_SCALES == BLOCK_SCALES) {
      if (loaded < 0) return;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int key = i * THREADS + me();
        if (KEYS % THREADS && key >= KEYS) break;
        base[loaded * STAGE + key] = k[i], base[loaded * STAGE + KEYS + key] = v[i];
      }
    }
  }
  KS_DEVICE const float* keys(int stage) const { return base + stage * STAGE; }
  KS_DEVICE const float* values(int stage) const { return base + stage * STAGE + KEYS; }
};

// The power of 2 in which a sum of values is counted.
struct Unit {
  static constexpr float LEAST = -120.f, MOST = 120.f;  // the inverse is no subnormal
  float exponent = LEAST;

  // With those of keys [begin, end) of a tile of KEYS counted in: what sums made so far are multiplied by. By a whole warp.
  template<int KEYS> KS_DEVICE float grow(const float* scales, int begin, int end) {
    float most = 0.f;
#pragma unroll
    for (int j = lane(); j < KEYS; j += WARP) {
      const float x = scales[j], size = maximum(x, -x);
      if (j >= begin && j < end && finite(size)) most = maximum(most, size);
    }
#pragma unroll
    for (int m = 1; m < WARP; m *= 2) most = maximum(most, shuffle_xor(most, m));
    const float log = maximum(log2_fast(most), LEAST), above = (float)((int)(log + 128.f) - 127);
    const float before = exponent;
    exponent = maximum(exponent, above < MOST ? above : MOST);
    return exp2_fast(before - exponent);
  }
  KS_DEVICE float size() const { return exp2_fast(exponent); }
  KS_DEVICE float inverse() const { return exp2_fast(-exponent); }
};
