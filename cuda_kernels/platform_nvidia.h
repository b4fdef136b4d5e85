// NVIDIA: the platform header that implements the tile vocabulary by mma.sync m16n8k16, ldmatrix and cp.async, on sm_75 by
// mma.sync m16n8k8 twice and by copies that are complete when they return.
// Accumulator fragments are mma.sync's: lane 4·g + t holds rows g, g+8 and columns 2t, 2t+1 of every 16×8 block.
#pragma once

#define KS_DEVICE __device__ __forceinline__
#define KS_CONSTANT extern "C" __constant__
#define KS_ARGUMENT const __grid_constant__
#define KS_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

static constexpr int WARP = 32;
// In a 16-byte load per lane, two lanes that read the same address are served together if their lane indices differ in bit 0 only,
// or in bit 1 only; the same bit for all pairs.
#define KS_PAIRED_LANES
// cp.async writes shared memory itself: STAGES − 1 copies are in flight while one stage is used.
static constexpr bool COPY_THROUGH_REGISTERS = false;
static constexpr float REFERENCE_RISE = 4;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
#if KS_E4M3
struct e4m3 { unsigned char bits; };  // float8_e4m3fn
#endif

KS_DEVICE int lane() { return threadIdx.x & 31; }
KS_DEVICE int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }  // uniform to the compiler; all lanes must call it
KS_DEVICE int thread_index() { return threadIdx.x; }
KS_DEVICE unsigned block_index() { return blockIdx.x; }
KS_DEVICE void block_barrier() { __syncthreads(); }
KS_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
KS_DEVICE bool block_any(bool x) { return __syncthreads_or(x); }
KS_DEVICE void warp_barrier() { __syncwarp(); }

template<int BYTES> KS_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

KS_DEVICE int shuffle_xor(int x, int m) { return __shfl_xor_sync(~0u, x, m); }
KS_DEVICE float shuffle_xor(float x, int m) { return __shfl_xor_sync(~0u, x, m); }
KS_DEVICE double shuffle_xor(double x, int m) { return __shfl_xor_sync(~0u, x, m); }
KS_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
KS_DEVICE double maximum(double a, double b) { return fmax(a, b); }
KS_DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
KS_DEVICE float log2_fast(float x) { return __log2f(x); }
KS_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// ---- conversions, rounding to nearest even

KS_DEVICE float to_sum(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
KS_DEVICE float to_sum(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
KS_DEVICE float to_sum(float x) { return x; }
KS_DEVICE double to_sum(double x) { return x; }

template<class T> struct Pack;
template<> struct Pack<f16> {
  static KS_DEVICE unsigned two(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
    unsigned d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d;
#else
    unsigned d;
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(d) : "f"(lo), "f"(hi));
    return d;
#endif
  }
};
template<> struct Pack<bf16> {
  static KS_DEVICE unsigned two(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
    unsigned d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d;
#else
    return __byte_perm(rounded(lo), rounded(hi), 0x7632);
  }
  // Its upper half to nearest even; a NaN stays one.
  static KS_DEVICE unsigned rounded(float x) {
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff0000u : bits + 0x7fff + (bits >> 16 & 1);
#endif
  }
};

template<class T> struct Convert {
  template<class S> static KS_DEVICE T from(S x) { return {(unsigned short)Pack<T>::two((float)x, 0.f)}; }
};
template<> struct Convert<float> { template<class S> static KS_DEVICE float from(S x) { return (float)x; } };
template<> struct Convert<double> { template<class S> static KS_DEVICE double from(S x) { return (double)x; } };
template<class T, class S> KS_DEVICE T convert(S x) { return Convert<T>::from(x); }

template<class T> KS_DEVICE T zero_of() { return T{}; }

#if KS_E4M3
// Four numbers of e4m3 as two pairs of T, exactly. There is an instruction to f16; to bf16 it goes on through float.
template<class T> KS_DEVICE void widen(unsigned x, unsigned& lo, unsigned& hi) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(lo), "=r"(hi) : "r"(x));
}
template<> KS_DEVICE void widen<bf16>(unsigned x, unsigned& lo, unsigned& hi) {
  widen<f16>(x, lo, hi);
  auto pair = [](unsigned y) {
    return Pack<bf16>::two(to_sum(f16{(unsigned short)y}), to_sum(f16{(unsigned short)(y >> 16)}));
  };
  lo = pair(lo), hi = pair(hi);
}
KS_DEVICE float to_sum(e4m3 x) {
  unsigned lo, hi;
  widen<f16>(x.bits, lo, hi);
  return to_sum(f16{(unsigned short)lo});
}
#endif

#include "tile/base.h"

// ---- atomic sums in global memory

// From sm_90 on one instruction adds four consecutive floats; before, neighbouring lanes add to neighbouring floats.
#if __CUDA_ARCH__ >= 900
static constexpr int ADDED = 4;
#else
static constexpr int ADDED = 1;
#endif
template<int N> KS_DEVICE void lanes_add(float* to, const float (&x)[N]) {
  static_assert(N % ADDED == 0, "whole groups of neighbours");
#pragma unroll
  for (int i = 0; i < N; i += ADDED) {
    float* const place = to + i * WARP + lane() * ADDED;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(place), "f"(x[i]), "f"(x[i + 1]),
                 "f"(x[i + 2]), "f"(x[i + 3]) : "memory");
#else
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(place), "f"(x[i]) : "memory");
#endif
  }
}
template<int N> KS_DEVICE void lanes_load(float (&x)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i += ADDED) {
    struct alignas(4 * ADDED) Group { float x[ADDED]; };
    const Group y = *(const Group*)(from + i * WARP + lane() * ADDED);
#pragma unroll
    for (int e = 0; e < ADDED; e++) x[i + e] = y.x[e];
  }
}

// ---- blocks that tell each other of what they wrote

KS_DEVICE void arrival_fence() {}  // an arrival and a barrier of its thread with others speak for them
KS_DEVICE int arrive(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- copies from global to shared memory

KS_DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 800
KS_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template<int PENDING> KS_DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#else  // a copy has ended when it returns, and the block's next barrier shows it
KS_DEVICE void copies_commit() {}
template<int PENDING> KS_DEVICE void copies_wait() {}
#endif

// The copy of one tile by THREADS threads. VECTOR = 16: every row starts 16-byte aligned; else elements are loaded one by one.
// EXACT: the tile is as wide as the matrix, so that no column is out of bounds. BRIEF: for less code, one path for
// tiles inside the matrix and at its end.
template<class Tile, int THREADS, int VECTOR, bool EXACT, bool BRIEF = false> struct Copy {
  typedef typename Tile::T T;
  typedef Share<Tile, THREADS> Mine;
  static constexpr int V = Mine::V;

  template<class View> KS_DEVICE void fetch(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    const int r0 = Mine::row(), c = Mine::column(), left = col_end - col0 - c;
    auto walk = v.template walk<Mine::STEP>(row0 + r0);
    const unsigned to = shared_address(&t.chunk(r0, c));
    // The shared address of round i; rows a swizzle period apart share one permutation of chunks.
    auto place = [&](int i) {
      return Mine::STEP % Tile::Layout::PERIOD == 0 ? to + i * Mine::STEP * Tile::COLS * (int)sizeof(T)
                                 : shared_address(&t.chunk(r0 + i * Mine::STEP, c));
    };
#if __CUDA_ARCH__ >= 800
    if constexpr (BRIEF && VECTOR == 16 && EXACT) {
      const T* at[Mine::ROUNDS];  // all at once: no load passes a copy
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++, walk.next()) at[i] = walk.at + col0 + c;
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++)
        if (Mine::takes(i)) {
          const int bytes = row0 + r0 + i * Mine::STEP < row_end ? 16 : 0;
          if constexpr (Tile::COLS * sizeof(T) > 64)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(at[i]), "r"(bytes) : "memory");
          else  // rows of other heads may lie beside it, which nobody wants yet
            asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(at[i]), "r"(bytes) : "memory");
        }
      return;
    }
#endif
    if (VECTOR == 16 && row0 + Tile::ROWS <= row_end && (EXACT || col0 + Tile::COLS <= col_end)) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++, walk.next())
        if (Mine::takes(i))
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(place(i)), "l"(walk.at + col0 + c)
                       : "memory");
#else
      constexpr int AT_ONCE = 4;  // loads before their stores
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i += AT_ONCE) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (i + j < Mine::ROUNDS) {
            if (Mine::takes(i + j)) x[j] = *(const uint4*)(walk.at + col0 + c);
            walk.next();
          }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (i + j < Mine::ROUNDS && Mine::takes(i + j)) store(place(i + j), x[j]);
      }
#endif
      return;
    }
#pragma unroll 1
    for (int i = 0; i < Mine::ROUNDS; i++, walk.next()) {
      if (!Mine::takes(i)) break;
      const bool row_in = row0 + r0 + i * Mine::STEP < row_end;
      const T* from = walk.at + col0 + c;
      const bool none = !row_in || left <= 0;
      if (VECTOR == 16 && (none || left >= V)) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(from),
                     "r"(none ? 0 : 16) : "memory");
#else
        store(place(i), none ? uint4{} : *(const uint4*)from);
#endif
      } else {
        Chunk<T> x;
#pragma unroll
        for (int e = 0; e < V; e++) x.v[e] = row_in && e < left ? from[e] : zero_of<T>();
        t.chunk(r0 + i * Mine::STEP, c) = x;
      }
    }
  }
  KS_DEVICE void land(Tile) {}
  template<class View> KS_DEVICE void load(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    const int r0 = Mine::row(), c = Mine::column(), left = col_end - col0 - c;
    Chunk<T> x[Mine::ROUNDS];
#pragma unroll
    for (int i = 0; i < Mine::ROUNDS; i++) {
      const bool there = Mine::takes(i) && row0 + r0 + i * Mine::STEP < row_end;
      const T* const from = v.row(there ? row0 + r0 + i * Mine::STEP : row0) + col0 + c;
      x[i] = {};
      if (VECTOR == 16 && (EXACT || left >= V)) {
        if (there) x[i] = *(const Chunk<T>*)from;
      } else {
#pragma unroll
        for (int e = 0; e < V; e++)
          if (there && e < left) x[i].v[e] = from[e];
      }
    }
#pragma unroll
    for (int i = 0; i < Mine::ROUNDS; i++)
      if (Mine::takes(i)) t.chunk(r0 + i * Mine::STEP, c) = x[i];
  }
  static KS_DEVICE void store(unsigned place, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  }
};

// ---- accumulators of 16×8 blocks, as mma.sync produces them: lane 4·g + t holds four elements of each block, two neighbours in
// its first row (h = 0) and two in its second (h = 1). Place gives their rows and columns.

KS_DEVICE int lane_group() { return lane() / 4; }
KS_DEVICE int lane_in_group() { return lane() % 4; }

template<class S, class Place> struct Accumulators {
  typedef S Sum;

  template<int R, int C> struct Acc { Sum x[R / 16][C / 8][4]; };
  template<int R> struct Row { Sum x[R / 16][2]; };

  template<int R, int C> static KS_DEVICE void zero(Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) a.x[r][c][0] = a.x[r][c][1] = a.x[r][c][2] = a.x[r][c][3] = 0;
  }

  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          a.x[r][c][e] = f(Place::row(r, e / 2), Place::column(c) + e % 2, a.x[r][c][e]);
  }

  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          a.x[r][c][e] = f(Place::row(r, e / 2), Place::column(c) + e % 2, a.x[r][c][e], b.x[r][c][e]);
  }

  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) f(Place::row(r, h), Place::column(c), a.x[r][c][2 * h], a.x[r][c][2 * h + 1]);
  }

  template<int R> static KS_DEVICE void fill(Row<R>& a, Sum v) {
#pragma unroll
    for (int r = 0; r < R / 16; r++) a.x[r][0] = a.x[r][1] = v;
  }
  template<int R, class F> static KS_DEVICE void zip(Row<R>& out, const Row<R>& a, const Row<R>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) out.x[r][h] = f(a.x[r][h], b.x[r][h]);
  }
  template<int R, class F> static KS_DEVICE void row_map(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) a.x[r][h] = f(Place::row(r, h), a.x[r][h]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) a.x[r][c][e] = f(a.x[r][c][e], v.x[r][e / 2]);
  }
  template<int R, int C> static KS_DEVICE void row_scale(Acc<R, C>& a, const Row<R>& v) {
    if constexpr (C >= 128) {  // fewer products cost less among the others than a branch that nothing passes
      bool changed = false;
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) changed |= v.x[r][h] != 1.f;
      if (!any_lane(changed)) return;
    }
    row_apply(a, v, [](float x, float y) { return x * y; });
  }
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        Sum v = maximum(a.x[r][0][2 * h], a.x[r][0][2 * h + 1]);
#pragma unroll
        for (int c = 1; c < C / 8; c++) v = maximum(v, maximum(a.x[r][c][2 * h], a.x[r][c][2 * h + 1]));
        v = maximum(v, shuffle_xor(v, 1));
        out.x[r][h] = maximum(v, shuffle_xor(v, 2));
      }
  }
  template<int R, int C> static KS_DEVICE void row_add_partial(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < C / 8; c++) out.x[r][h] += a.x[r][c][2 * h] + a.x[r][c][2 * h + 1];
  }
  template<int R> static KS_DEVICE void row_finish_sum(Row<R>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        a.x[r][h] += shuffle_xor(a.x[r][h], 1);
        a.x[r][h] += shuffle_xor(a.x[r][h], 2);
      }
  }
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    if (lane_in_group() == 0)
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) f(Place::row(r, h), a.x[r][h]);
  }

  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          To* p = &out.at(row0 + Place::row(r, h), column0 + Place::column(c));
          const Sum lo = a.x[r][c][2 * h], hi = a.x[r][c][2 * h + 1];
          if constexpr (sizeof(To) == 2) *(unsigned*)p = Pack<To>::two(lo, hi);
          else { struct alignas(2 * sizeof(To)) Two { To x, y; }; *(Two*)p = {(To)lo, (To)hi}; }
        }
  }

  template<int R, int C> static KS_DEVICE void atomic_add(float* to, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) lanes_add(to + r * 16 * C + c * 128, a.x[r][c]);
  }
  template<int R, int C> static KS_DEVICE void load(Acc<R, C>& a, const float* from) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++) lanes_load(a.x[r][c], from + r * 16 * C + c * 128);
  }
};

// Rows g and g + 8 of a block, columns 2t and 2t + 1: mma.sync's own fragment layout.
struct AsMultiplied {
  static KS_DEVICE int row(int r, int h) { return 16 * r + lane_group() + 8 * h; }
  static KS_DEVICE int column(int c) { return 8 * c + 2 * lane_in_group(); }
};

// ---- the matrix engine: tensor cores

KS_DEVICE void ldmatrix(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}
KS_DEVICE void ldmatrix_transposed(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

template<class T> struct Mma;
template<> struct Mma<f16> {
  static KS_DEVICE void run(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // the halves of k one after the other: a[0], a[1] and b0 have the first 8
    half(c, a[0], a[1], b0), half(c, a[2], a[3], b1);
  }
  static KS_DEVICE void half(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
#endif
  }
};
template<> struct Mma<bf16> {
  static KS_DEVICE void run(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template<class T_> struct MatrixEngine : Accumulators<float, AsMultiplied> {
  typedef T_ T;
  static constexpr bool MATRIX = true;
  static constexpr int K_STEP = 16;
  static constexpr bool ONE_LAYOUT = true;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // Shared address of the chunk at (row0 + r, column0 + c); row0 and column0 are multiples of 16, r and c less than 16.
    // Rows 16 apart share one swizzle, and the swizzle is an XOR with some bits of the address (tiles begin at multiples of 128
    // bytes). So the swizzled address of (r, c) serves them all, and where row0 and column0 are compile-time constants the rest
    // costs little or nothing.
    KS_DEVICE unsigned address(int row0, int r, int column0, int c) const {
      constexpr int TURNED = (PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>::Layout::P - 1) * 8;
      const unsigned first = shared_address(&this->chunk(r, c));
      return (first ^ (column0 & TURNED) * (int)sizeof(T)) + (row0 * this->COLS + (column0 & ~TURNED)) * (int)sizeof(T);
    }
  };

  template<int R, int K> struct Operand { unsigned x[R / 16][K / 16][4]; };

  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    Operand<R, K> a;
    const int low = lane() % 16, high = lane() / 16, inner = lane() % 8, middle = lane() / 8 % 2;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int r = 0; r < R / 16; r++) {
        if constexpr (From::K_LAST) ldmatrix(a.x[r][k], tile.address(row0 + 16 * r, low, k0 + 16 * k, 8 * high));
        else ldmatrix_transposed(a.x[r][k], tile.address(k0 + 16 * k, inner + 8 * high, row0 + 16 * r, 8 * middle));
      }
    return a;
  }

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % 16 == 0, "shape of a matrix product");
    const int low = lane() % 16, high = lane() / 16, inner = lane() % 8, middle = lane() / 8 % 2;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int c = 0; c < C / 16; c++) {
        unsigned x[4];
        if constexpr (B::K_LAST) ldmatrix(x, b.address(n0 + 16 * c, inner + 8 * high, k0 + 16 * k, 8 * middle));
        else ldmatrix_transposed(x, b.address(k0 + 16 * k, low, n0 + 16 * c, 8 * high));
#pragma unroll
        for (int r = 0; r < R / 16; r++) {
          Mma<T>::run(acc.x[r][2 * c], a.x[r][k], x[0], x[1]);
          Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], x[2], x[3]);
        }
      }
  }

  // An accumulator fragment's columns 8c, 8c+8 are an A fragment's k already: no exchange between lanes.
  template<int R, int C> static constexpr int operand_bytes() { return 0; }
  template<int R, int C> static KS_DEVICE Operand<R, C> to_operand(const Acc<R, C>& a, char*) {
    Operand<R, C> p;
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int k = 0; k < C / 16; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float(&x)[4] = a.x[r][2 * k + e / 2];
          p.x[r][k][e] = Pack<T>::two(x[2 * (e % 2)], x[2 * (e % 2) + 1]);
        }
    return p;
  }
};

#if KS_E4M3
// ---- right factors that are stored as e4m3 and multiplied as T: shared memory holds them as they lie in global memory, and
// they are converted in registers.
//
// ldmatrix moves pairs of e4m3, and a lane has four neighbours of a row where it has two elements of T. So
// - a factor whose rows are k (K_LAST) is multiplied with k in another order within 16, in which the left factor is loaded too:
//   lane 4·g + t has k = 4t … 4t + 3;
// - of a transposed factor a lane has columns 2g and 2g + 1: the even columns of 16 are one block of accumulators and the odd
//   ones the next. What walks over such accumulators is told their true columns: lane 4·g + t has 4t … 4t + 3.
KS_DEVICE void ldmatrix_two(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
}
KS_DEVICE void ldmatrix_two_transposed(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
}

template<class T_> struct E4m3Engine {
  typedef T_ T;
  typedef MatrixEngine<T> E;
  template<int R, int C> using Acc = typename E::template Acc<R, C>;
  template<int R, int K> using Operand = typename E::template Operand<R, K>;
  static constexpr int K_STEP = 32;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    typedef PlainTile<e4m3, K_LAST_ ? N : K, K_LAST_ ? K : N> Plain;
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : Plain(m) {}
    KS_DEVICE e4m3 element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // Shared address of the chunk at (row0 + r, column); row0 and column are multiples of 16.
    KS_DEVICE unsigned address(int row0, int r, int column) const {
      constexpr int TURNED = (Plain::Layout::P - 1) * 16;
      const unsigned first = shared_address(&this->chunk(r, 0));
      return (first ^ (column & TURNED)) + row0 * this->COLS + (column & ~TURNED);
    }
  };

  // A left factor for right factors whose rows are k.
  template<int R, int K, class From> static KS_DEVICE Operand<R, K> operand(From tile, int row0, int k0) {
    struct alignas(8) Two { unsigned lo, hi; };
    Operand<R, K> a;
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
      for (int r = 0; r < R / 16; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Two x = *(const Two*)&tile.at(row0 + 16 * r + 8 * h + lane_group(), k0 + 16 * k + 4 * lane_in_group());
          a.x[r][k][h] = x.lo, a.x[r][k][2 + h] = x.hi;
        }
    return a;
  }

  template<int R, int C, int K, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K>& a, B b, int n0, int k0) {
    static_assert(C % 16 == 0 && K % 16 == 0 && R % 16 == 0, "shape of a matrix product");
    constexpr int PIECES = B::K_LAST ? K / 16 : C / 16, OTHERS = B::K_LAST ? C / 16 : K / 16;
    const int low = lane() % 16, high = lane() / 16;
#pragma unroll
    for (int other = 0; other < OTHERS; other++)
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += 2) {
        const int row0 = B::K_LAST ? n0 + 16 * other : k0 + 16 * other, column0 = (B::K_LAST ? k0 : n0) + 16 * piece;
        unsigned x[4];  // two rows of 8 of each of two pieces of 16 columns
        if (piece + 1 < PIECES) {
          const unsigned from = b.address(row0, low, column0 + 16 * high);
          if constexpr (B::K_LAST) ldmatrix(x, from);
          else ldmatrix_transposed(x, from);
        } else {
          unsigned two[2];
          const unsigned from = b.address(row0, low, column0);
          if constexpr (B::K_LAST) ldmatrix_two(two, from);
          else ldmatrix_two_transposed(two, from);
          x[0] = two[0], x[1] = two[1];
        }
#pragma unroll
        for (int p = 0; p < 2 && piece + p < PIECES; p++) {
          unsigned lo[2], hi[2];
#pragma unroll
          for (int h = 0; h < 2; h++)
            widen<T>(B::K_LAST ? x[2 * p + h] : __byte_perm(x[2 * p + h], 0, 0x3120), lo[h], hi[h]);
          const int k = B::K_LAST ? piece + p : other, c = B::K_LAST ? other : piece + p;
#pragma unroll
          for (int r = 0; r < R / 16; r++) {
            Mma<T>::run(acc.x[r][2 * c], a.x[r][k], lo[0], B::K_LAST ? hi[0] : lo[1]);
            Mma<T>::run(acc.x[r][2 * c + 1], a.x[r][k], B::K_LAST ? lo[1] : hi[0], hi[1]);
          }
        }
      }
  }

  // Accumulators of a product with a factor that is not K_LAST.
  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          a.x[r][c][e] = f(AsMultiplied::row(r, e / 2), column(c) + 2 * (e % 2), a.x[r][c][e]);
  }
  template<class Out, int R, int C> static KS_DEVICE void to_shared(Out out, const Acc<R, C>& a) {
    typedef typename Out::T To;
    struct alignas(4 * sizeof(To)) Four { To x[4]; };
#pragma unroll
    for (int r = 0; r < R / 16; r++)
#pragma unroll
      for (int c = 0; c < C / 8; c += 2)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float(&even)[4] = a.x[r][c], (&odd)[4] = a.x[r][c + 1];
          *(Four*)&out.at(AsMultiplied::row(r, h), column(c)) = {convert<To>(even[2 * h]), convert<To>(odd[2 * h]),
                                                                 convert<To>(even[2 * h + 1]), convert<To>(odd[2 * h + 1])};
        }
  }
  static KS_DEVICE int column(int c) { return c / 2 * 16 + 4 * lane_in_group() + c % 2; }
};
#endif

#include "wide_engine.h"
#if KS_E4M3
#include "e4m3_engine.h"
#endif
