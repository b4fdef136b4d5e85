// Products of few rows with keys as they lie in memory: rows of 8 bits that hold their scales (latent_few.h).
//
// A ring of tiles of whole rows, 656 bytes each, by bulk copies. Tensor cores take fragments that lanes make in registers of what they
// read there, by mma.sync: e4m3 becomes f16 without rounding, an instruction for two numbers. What scales would multiply is not
// numbers: scores are multiplied by them, a block of 128 columns each, and of weights there are four, one for the values of each
// block. Queries become f16, too, times a power of two that brings their row's largest below 2^15: smaller ones lose bits
// below 2^-39 of it. Weights times scales are f16 in units of the largest scale so far, a power of two.
//
// Scores: keys are rows of products, 16 of a warp. Values: columns are, 128 of a warp, whose scale is one.
// Which key, or column, stands where in a fragment is free, if the other operand agrees: such that every lane reads 16 bytes
// at a time, and 8 lanes of all banks: rows that are 2 and 4 apart do (656 bytes are 4 banks more than a multiple of 32).
#pragma once
#include "sm90/attention/latent_load.h"

struct RowProducts : FewThread {
  PipelineState<STAGES> state{own, 0};

  KS_DEVICE explicit RowProducts(const FewThread& thread) : FewThread(thread) {}
  KS_DEVICE int g() const { return thread_lane / 4; }
  KS_DEVICE int t() const { return thread_lane % 4; }
  KS_DEVICE u32 tile() const { return shared_address(storage.k[state.stage]); }
  KS_DEVICE u32 weights(int block) const { return shared_address(storage.p[own]) + block * QUERY_PANEL_BYTES; }
  KS_DEVICE u32 weights_place(int column) const {
    const int r = thread_lane % 8, place = thread_lane / 8;
    return (8 * (place / 2) + r) * 128 + ((column + place % 2) ^ r) * 16;
  }
  KS_DEVICE void release() {
    async_proxy_fence();
    warp_barrier();
    if (thread_lane == 0) barrier_arrive(k_rings[0].empty(state));
    state.advance(2);
  }

  static constexpr int HEADROOM = 7;  // weights are at most 2^8, and units so many powers of two below what they could be
  static constexpr u32 LEAST_UNIT = (127 - 100) << 23;
  // Of each block's weights: bits of a power of two.
  typedef u32 Units[4];
  static KS_DEVICE void begin(Units& units) {
#pragma unroll
    for (int b = 0; b < 4; b++) units[b] = LEAST_UNIT;
  }

  KS_DEVICE int key(int half) const { return 16 * warp + (g() % 2 ? 8 + (g() + 3) % 8 : g()) + half; }

  KS_DEVICE void make_scores(float (&s)[8]) const {
    k_rings[0].wait_full(state);
    const u32 row = tile() + key(0) * ROW_BYTES, x = row + 16 * t(), q = shared_address(storage.q) + g() * QUERY_PITCH + 32 * t();
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = 0.f;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const float scales[2] = {load_float(row + DV + 4 * b), load_float(row + ROW_BYTES + DV + 4 * b)};
      float c[2][2][4] = {};
#pragma unroll
      for (int j = 2 * b; j < 2 * b + 2; j++) {
        u32 k[2][4];
        load_fragment(x + 64 * j, k[0]);
        load_fragment(x + ROW_BYTES + 64 * j, k[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 y[2][4];
          load_fragment(q + 128 * j + 16 * i, y[0]);
          load_fragment(q + 8 * QUERY_PITCH + 128 * j + 16 * i, y[1]);
#pragma unroll
          for (int e = 0; e < 2; e++) {
            u32 f[4];
            widen<f16>(k[0][2 * i + e], f[0], f[2]);
            widen<f16>(k[1][2 * i + e], f[1], f[3]);
#pragma unroll
            for (int n = 0; n < 2; n++) Mma<f16>::run(c[e][n], f, y[n][2 * e], y[n][2 * e + 1]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& to = s[4 * n + i];
          to = fmaf(scales[i / 2], c[0][n][i] + c[1][n][i], to);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float unit = storage.query_units[row_of(i)];
      s[i / 2 * 4 + i % 2] *= unit, s[i / 2 * 4 + i % 2 + 2] *= unit;
    }
    const u32 rotated = shared_address(storage.q_rotated) + g() * ROTATED_PITCH + 16 * t();
#pragma unroll
    for (int j = 0; j < 2; j++) {
      u32 k[2][4], y[2][4];
      load_fragment(x + BEHIND + 64 * j, k[0]);
      load_fragment(x + BEHIND + ROW_BYTES + 64 * j, k[1]);
      load_fragment(rotated + 64 * j, y[0]);
      load_fragment(rotated + 8 * ROTATED_PITCH + 64 * j, y[1]);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 f[4] = {k[0][2 * e], k[1][2 * e], k[0][2 * e + 1], k[1][2 * e + 1]};
#pragma unroll
        for (int n = 0; n < 2; n++) Mma<T>::run((float (&)[4])s[4 * n], f, y[n][2 * e], y[n][2 * e + 1]);
      }
    }
  }

  // Before warps meet: the largest scale of each block, of this warp's keys; after, those of the tile. What is not finite is no unit.
  KS_DEVICE void tell_units(int buffer) const {
    const char* const row = storage.k[state.stage] + key(0) * ROW_BYTES + DV + 4 * t();
    u32 top = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 bits = *(const u32*)(row + half * ROW_BYTES) & 0x7fffffff;
      if (bits < 0x7f000000) top = max(top, bits);
    }
#pragma unroll
    for (int m = 4; m < WARP; m *= 2) top = max(top, (u32)shuffle_xor((int)top, m));
    if (thread_lane < 4) storage.exchange.scales[own][buffer][warp][thread_lane] = top;
  }
  // Returns the factor of this warp's sums.
  KS_DEVICE float raise_units(Units& units, int buffer) const {
    u32 x[4][4];
#pragma unroll
    for (int w = 0; w < 4; w++) load_fragment(shared_address(storage.exchange.scales[own][buffer][w]), x[w]);
    u32 before = 0, now = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const u32 most = max(max(x[0][b], x[1][b]), max(x[2][b], x[3][b]));
      if (b == warp) before = units[b];
      units[b] = max(units[b], (most + 0x7fffff) & 0x7f800000);
      if (b == warp) now = units[b];
    }
    return __uint_as_float((u32)max_of((int)((127u << 23) - (now - before)), 0));  // 0 where they are too far apart
  }

  KS_DEVICE void put_weights(const float (&s)[8], const Units& units) const {
    const u32 place = weights_place(2 * warp), row = tile() + key(0) * ROW_BYTES + DV;
    float scales[2][4];
    load_four(row, scales[0]);
    load_four(row + ROW_BYTES, scales[1]);
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const float unit = __uint_as_float(((254u + HEADROOM) << 23) - units[b]), x = scales[0][b] * unit, y = scales[1][b] * unit;
      stmatrix_transposed(weights(b) + place, Pack<f16>::two(s[0] * x, s[1] * x), Pack<f16>::two(s[2] * y, s[3] * y),
                          Pack<f16>::two(s[4] * x, s[5] * x), Pack<f16>::two(s[6] * y, s[7] * y));
    }
  }

  // Sets what is not finite of a tile's values from key `from` on to zero, and of its scales: not all rows see them.
  KS_DEVICE void filter(int from) const {
    const int first = max_of(from, 0);
    const int i = WARP * warp + thread_lane;
    if (i >= first && i < BN)
      for (int b = 0; b < 4; b++) {
        float& x = ((float*)(storage.k[state.stage] + i * ROW_BYTES + DV))[b];
        if (!(fabsf(x) < infinity())) x = 0.f;
      }
#pragma unroll 1
    for (int n = first * (DV / 16) + i; n < BN * (DV / 16); n += 4 * WARP) {
      uint4& x = *(uint4*)(storage.k[state.stage] + n / (DV / 16) * ROW_BYTES + n % (DV / 16) * 16);
      x = {numbers(x.x), numbers(x.y), numbers(x.z), numbers(x.w)};
    }
    async_proxy_fence();
    named_barrier_sync(FILTERED + own, 128);
  }
  // Four e4m3 without NaN, whose bits are all ones but the sign.
  static KS_DEVICE u32 numbers(u32 x) {
    const u32 none = ((x & 0x7f7f7f7f) + 0x01010101) & 0x80808080;  // the highest bit of each that is one
    return x & ~(none | (none - (none >> 7)));
  }

  KS_DEVICE void multiply(float (&o)[8][8]) const {
    const u32 at = tile() + 128 * warp + 16 * g(), x = at + 2 * t() * ROW_BYTES, y = at + (8 + (2 * t() + 4) % 8) * ROW_BYTES;
#pragma unroll
    for (int s = 0; s < BN / 16; s++) {
      u32 p[4], k[4][4];
      ldmatrix(weights(warp) + weights_place(2 * s), p);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        load_fragment(x + (16 * s + h) * ROW_BYTES, k[2 * h]);
        load_fragment(y + (16 * s + h) * ROW_BYTES, k[2 * h + 1]);
      }
#pragma unroll
      for (int m = 0; m < 8; m++) {
        u32 f[4];
#pragma unroll
        for (int h = 0; h < 2; h++)
          widen<f16>(__byte_perm(k[2 * h][m / 2], k[2 * h + 1][m / 2], m % 2 ? 0x7362 : 0x5140), f[2 * h], f[2 * h + 1]);
#pragma unroll
        for (int n = 0; n < 2; n++) Mma<f16>::run((float (&)[4])o[m][4 * n], f, p[2 * n], p[2 * n + 1]);
      }
    }
  }
  // What its sums are in units of.
  KS_DEVICE float unit(const Units& units) const {
    u32 bits = 0;
#pragma unroll
    for (int b = 0; b < 4; b++)
      if (b == warp) bits = units[b];
    return __uint_as_float(bits - (HEADROOM << 23));
  }
  // A row's 16 columns of this lane.
  template<class X> KS_DEVICE void put(X* row, const float (&o)[8][8], int first, float factor) const {
    X x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = convert<X>(o[i / 2][first + i % 2 * 2] * factor);
    constexpr int PER = 16 / sizeof(X);
#pragma unroll
    for (int i = 0; i < 16 / PER; i++) {
      struct alignas(16) Chunk { X x[PER]; } y;
#pragma unroll
      for (int j = 0; j < PER; j++) y.x[j] = x[i * PER + j];
      ((Chunk*)(row + 128 * warp + 16 * g()))[i] = y;
    }
  }
};

// Whole rows: all of a page at once by bulk copies of one warp, where they lie together (the others have the queries); else one by one, by
// cp.async of all warps, and of each tile as many by bulk copies as these bring in its time.
struct RowProducer : Producer {
  static constexpr int BULK_PASSES = 1;
  bool together;

  KS_DEVICE u32 stage() const { return shared_address(storage.k[state.stage]); }
  KS_DEVICE void load_pages(const Pieces& pieces) {
    const Ring<STAGES>& ring = k_rings[0];
    const u64 once = evict_first();
    pieces.each([&](const Piece& piece, const Rows& rows) {
      KeyRows<2, 1> keys(*this, piece, rows);
#pragma unroll 1
      for (int tile = piece.begin; tile < piece.end; tile++) {
        const u32 to = stage(), full = ring.full(state);
        const int count = min_of(max_of(keys.limit - tile * BN, 0), BN);
        ring.wait_empty(state);
        for (int i = count * (ROW_BYTES / 16) + lane(); i < BN * (ROW_BYTES / 16); i += WARP) store_zeros(to + 16 * i);
        if (count < BN) async_proxy_fence();
        warp_barrier();
        if (lane() == 0) barrier_arrive_expect_tx(full, count * ROW_BYTES);
        warp_barrier();
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int row = keys.row(i), number = keys.key(tile, i), page = Config::KV_VIEW == PAGED ? pages.size.d : 0x7fffffff;
          const int in_page = number - (Config::KV_VIEW == PAGED ? pages.size.quotient(number) * page : 0);
          if (!keys.there(tile, i) || (row && in_page)) continue;
          bulk_load(to + row * ROW_BYTES, keys.at(tile, i), min_of(count - row, page - in_page) * ROW_BYTES, full, once);
        }
        keys.look_up(tile + 1);
        state.advance();
      }
    });
  }
  // A row by eight lanes, each of which has the same 16 bytes of every line of memory: a line is asked for once. Six lines have it all.
  KS_DEVICE void copy_row(u32 to, const char* from, bool there, u64 policy) const {
    static_assert(!BY_ROWS || ROW_BYTES == 5 * 128 + 16, "the first line and the last have nine of the lanes' pieces");
    const int at = thread % 8, shift = (int)((u64)from / 16 % 8);
    from += 16 * (at - shift), to += 16 * (at - shift);
    if (at >= shift) async_copy(to, from, there, policy);
#pragma unroll
    for (int i = 1; i < 5; i++) async_copy(to + 128 * i, from + 128 * i, there, policy);
    if (at <= shift) async_copy(to + 640, from + 640, there, policy);
  }
  KS_DEVICE void load_rows(const Pieces& pieces) {
    const Ring<STAGES>& ring = k_rings[0];
    const u64 once = evict_first();
    int ahead = 1;  // tiles before the queries: once the block works, as many as it has room for
    pieces.each([&](const Piece& piece, const Rows& rows) {
      KeyRows<PASSES, 8> keys(*this, piece, rows);
      const int queries = min_of(piece.begin + ahead, piece.end) - 1;
#pragma unroll 1
      for (int tile = piece.begin; tile < piece.end; tile++) {
        ring.wait_empty(state);
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
          const u32 to = stage() + keys.row(i) * ROW_BYTES;
          if (i >= BULK_PASSES || !keys.there(tile, i)) {
            copy_row(to, keys.at(tile, i), keys.there(tile, i), once);
          } else if (thread % 8 == 0) {
            barrier_expect_tx(ring.full(state), ROW_BYTES);
            bulk_load(to, keys.at(tile, i), ROW_BYTES, ring.full(state), once);
          }
        }
        async_copies_arrive(ring.full(state));
        keys.look_up(tile + 1);
        state.advance();
        if (tile == queries) load_queries<4>(piece, rows, thread / WARP);
      }
      ahead = STAGES;
    });
    async_copies_wait();
  }
  static KS_DEVICE float largest(const uint4& x) {
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 pair = (&x.x)[i];
      top = maximum(top, maximum(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000))));
    }
    return top;
  }
  // Times a power of two to f16.
  static KS_DEVICE uint4 scaled(const uint4& x, float by) {
    auto two = [&](u32 y) { return Pack<f16>::two(__uint_as_float(y << 16) * by, __uint_as_float(y & 0xffff0000) * by); };
    return {two(x.x), two(x.y), two(x.z), two(x.w)};
  }
  // Two rows from r on, 16 lanes each; zeros of those that are not there.
  KS_DEVICE void load_queries_of(const Piece& piece, const Rows& rows, int r) const {
    constexpr int EACH = DV / 128;  // chunks of a lane
    r += lane() / 16;
    const int at = lane() % 16;
    uint4 x[EACH] = {}, rotated = {};
    if (r < rows.count) {
      const uint4* const from = (const uint4*)query(piece, rows, r) + at;
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] = from[16 * i];
      if (at < 8) rotated = from[16 * EACH];
    }
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) top = maximum(top, largest(x[i]));
#pragma unroll
    for (int m = 1; m < 16; m *= 2) top = maximum(top, shuffle_xor(top, m));
    const u32 exponent = max(__float_as_uint(top) >> 23, 15u);
    uint4* const to = (uint4*)(storage.q + r * QUERY_PITCH) + at;
#pragma unroll
    for (int i = 0; i < EACH; i++) to[16 * i] = scaled(x[i], __uint_as_float((268 - exponent) << 23));
    if (at < 8) ((uint4*)(storage.q_rotated + r * ROTATED_PITCH))[at] = rotated;
    if (at == 0) storage.query_units[r] = __uint_as_float((exponent - 14) << 23);
  }
  // By so many warps, of which this is number `warp`.
  template<int WARPS> KS_DEVICE void load_queries(const Piece& piece, const Rows& rows, int warp) {
    q_ring.wait_empty(q_state);
#pragma unroll 1
    for (int r = 2 * warp; r < ROWS; r += 2 * WARPS) load_queries_of(piece, rows, r);
    warp_barrier();
    if (lane() == 0) barrier_arrive(q_ring.full(q_state));
    q_state.advance();
  }
  KS_DEVICE void run(const Pieces& pieces) {
    const int warp = thread / WARP;
    if (!together) load_rows(pieces);
    else if (warp == 0) load_pages(pieces);
    else pieces.each([&](const Piece& piece, const Rows& rows) { load_queries<3>(piece, rows, warp - 1); });
  }
};
