// NVIDIA: the platform header that implements the tile vocabulary by mma.sync m16n8k16, ldmatrix and cp.async, on sm_75 by
// mma.sync m16n8k8 twice and by copies that are complete when they return.
// Here: types, conversions, atomics; the rest is in copy.h and in a header for each kind of engine.
#pragma once

#define KS_DEVICE __device__ __forceinline__
#define KS_CONSTANT extern "C" __constant__
#define KS_ARGUMENT const __grid_constant__
#define KS_OFFSET(type, member) __INTADDR__(&((type*)0)->member)  // nvrtc has __builtin_offsetof from 13.5 on only
#define KS_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

static constexpr int WARP = 32;
// In a 16-byte load per lane, two lanes that read the same address are served together if their lane indices differ in bit 0 only,
// or in bit 1 only; the same bit for all pairs.
#define KS_PAIRED_LANES
#define KS_TF32  // there is Tf32Engine
// cp.async writes shared memory itself: STAGES − 1 copies are in flight while one stage is used.
static constexpr bool COPY_THROUGH_REGISTERS = false;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
#if KS_E4M3
struct e4m3 { unsigned char bits; };  // float8_e4m3fn
#endif

KS_DEVICE int lane() { return threadIdx.x & 31; }
KS_DEVICE int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }  // uniform to the compiler; all lanes must call it
KS_DEVICE int thread_index() { return threadIdx.x; }
KS_DEVICE unsigned block_index() { return blockIdx.x; }
// As a value that the compiler takes for a new one.
KS_DEVICE unsigned block_index_again() { unsigned x; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x)); return x; }
#define KS_BLOCK_INDEX_AGAIN block_index_again()
// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs.
#if __CUDA_ARCH__ >= 900
// Until the kernels before it have ended and their writes can be read. Without such a launch they have.
KS_DEVICE void earlier_kernels_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may start as soon as all blocks have said so, or ended, and there is room for its blocks.
KS_DEVICE void next_kernel_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
KS_DEVICE void earlier_kernels_wait() {}
KS_DEVICE void next_kernel_launch() {}
#endif
KS_DEVICE void block_barrier() { __syncthreads(); }
KS_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
KS_DEVICE bool block_any(bool x) { return __syncthreads_or(x); }
KS_DEVICE void warp_barrier() { __syncwarp(); }
template<class X> KS_DEVICE X opaque(X x) { return x; }
KS_DEVICE int known_uniform(int x) { return x; }
KS_DEVICE constexpr bool few_uniform_registers() { return false; }
template<class X> KS_DEVICE X in_lanes(X x) { return x; }

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
// 1/x, to a rounding, without a branch.
KS_DEVICE float reciprocal_fast(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// Within two roundings, over all numbers, without a branch.
KS_DEVICE float divide_fast(float x, float y) { float z; asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z; }
KS_DEVICE float sqrt_fast(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// Of normal numbers.
KS_DEVICE float rsqrt_fast(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
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
template<> struct Convert<e4m3> {
  template<class S> static KS_DEVICE e4m3 from(S x) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"((float)x));
    return {(unsigned char)two};
  }
};
#endif

#include "tile/base.h"

// ---- two neighbours at once, as words

template<> struct Two<bf16> {
  static KS_DEVICE void to_sums(const bf16* from, float& x, float& y) {
    const unsigned two = *(const unsigned*)from;
    x = __uint_as_float(two << 16), y = __uint_as_float(two & 0xffff0000u);
  }
  static KS_DEVICE void convert_to(bf16* to, float x, float y) { *(unsigned*)to = Pack<bf16>::two(x, y); }
};
template<> struct Two<f16> {
  static KS_DEVICE void to_sums(const f16* from, float& x, float& y) { of_word(*(const unsigned*)from, x, y); }
  static KS_DEVICE void of_word(unsigned two, float& x, float& y) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(x), "=f"(y) : "r"(two));
  }
  static KS_DEVICE void convert_to(f16* to, float x, float y) { *(unsigned*)to = Pack<f16>::two(x, y); }
};
#if KS_E4M3
template<> struct Two<e4m3> {
  static KS_DEVICE void to_sums(const e4m3* from, float& x, float& y) {
    unsigned two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(*(const unsigned short*)from));
    Two<f16>::of_word(two, x, y);
  }
  static KS_DEVICE void convert_to(e4m3* to, float x, float y) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(*(unsigned short*)to) : "f"(y), "f"(x));
  }
};
#endif

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

#include "copy.h"
#include "engine.h"
#include "wide_engine.h"
#include "tf32_engine.h"
#if KS_E4M3
#include "mixed_input_engine.h"
#include "e4m3_engine.h"
#endif
