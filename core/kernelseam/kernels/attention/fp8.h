// Keys and values in 8-bit floats, queries too or not, and the scales that dequantize them.
//
// A head's scales (HEAD_SCALES): k's is a factor of its scores, v's of its result. Those of blocks of keys (BLOCK_SCALES): a
// key's product is multiplied by k's, and its weight, once it is counted in the sum l, by v's. Weights are rounded to T, whose
// range may be small: they are multiplied by scale/2^unit, 2^unit being the least power of 2 above all scales met so far, and o is
// counted in 2^unit, as it is in the running maximum.
//
// Scales of queries: a KV head's are one more factor of its scores, those of blocks of queries each a row's.
#pragma once
#include "attention/sequences.h"

enum { NO_SCALES, HEAD_SCALES, BLOCK_SCALES };
typedef Config::KV KV;
typedef Config::Q Query;

// The scales of k or of v; strides in elements. Of paged keys a page stands for the batch.
struct Scales {
  const float* base;
  i64 batch;
  int head, block;
};

// `block`: keys that share a scale. Those of blocks have the same strides for k and v.
struct KvScales {
  Scales k, v;
  FastDivmod block;
  // Those of an entry's head, or of a head in all pages.
  KS_DEVICE KvScales of(int batch, int head) const {
    const int b = Config::KV_SCALES == BLOCK_SCALES && Config::KV_VIEW == PAGED ? 0 : batch;
    const i64 of_k = b * k.batch + (i64)head * k.head, of_v = b * v.batch + (i64)head * v.head;
    KvScales own = *this;
    own.k.base += of_k, own.v.base += Config::KV_SCALES == BLOCK_SCALES ? of_k : of_v;
    return own;
  }
  // Of an entry's head: what all its keys are multiplied by, and all its values.
  KS_DEVICE float of_keys() const { return Config::KV_SCALES == HEAD_SCALES ? *k.base : 1.f; }
  KS_DEVICE float of_values() const { return Config::KV_SCALES == HEAD_SCALES ? *v.base : 1.f; }
};

// The scales of q, strides in elements; `rows`: queries that share one.
struct QueryScales {
  const float* base;
  i64 batch;
  int head, block;
  FastDivmod rows;
  // Of a KV head of an entry: what all its queries are multiplied by.
  KS_DEVICE float of_head(int entry, int kv_head) const {
    return Config::Q_SCALES == HEAD_SCALES ? base[entry * batch + (i64)kv_head * head] : 1.f;
  }
  // Of a query, counted from the entry's first or, of packed rows, from the first of all.
  KS_DEVICE float of_query(int entry, int own_head, int query) const {
    return base[entry * batch + (i64)own_head * head + (i64)rows.quotient(query) * block];
  }
};

// The row of a key where its blocks are counted from, and its page (0 where there is none).
struct ScalePlace { int page, row; };

// A scale for each key of a ring's tiles, KEYS each, by THREADS threads (WARP: by each warp its own). They are loaded when a tile
// is fetched and stored a tile later, so that no thread waits for them.
template<int KEYS, int THREADS> struct ScaleRing {
  static constexpr int EACH = (KEYS + THREADS - 1) / THREADS, STAGE = 2 * KEYS;
  float* const base;
  float k[EACH], v[EACH];
  int loaded = -1;  // the stage of what was loaded

  KS_DEVICE explicit ScaleRing(char* memory) : base((float*)memory) {}
  static KS_DEVICE int me() { return THREADS == WARP ? lane() : thread_index(); }
  // `scales`: a head's; place(i): where the scales of key i·THREADS + me() of the tile are.
  template<class Place> KS_DEVICE void fetch(int stage, const KvScales& scales, Place place) {
    if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (KEYS % THREADS && i * THREADS + me() >= KEYS) break;
        const ScalePlace own = place(i);
        const i64 at = own.page * scales.k.batch + (i64)scales.block.quotient(own.row) * scales.k.block;
        k[i] = scales.k.base[at], v[i] = scales.v.base[at];
      }
      loaded = stage;
    }
  }
  // Before a barrier. Never while another thread may read that stage.
  KS_DEVICE void land() {
    if constexpr (Config::KV_SCALES == BLOCK_SCALES) {
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

  // With those of keys [begin, end) of a tile of KEYS counted in: what the sums so far are multiplied by. By a whole warp.
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
