// AMD: wave64 with MFMA (gfx90a, gfx942, gfx950), wave32 with WMMA (gfx11, gfx12). The vendor's half of the tile vocabulary.
//
// Constants (from the arch's row): KS_WARP (lanes), KS_SIMDS (vector units that share a compute unit's waves),
// KS_LDS_BANKS (of 4 bytes, for wide reads), KS_MATRIX_HEADER (the arch's matrix instructions and how their operands lie
// in lanes), KS_BF16_CONVERTS where an instruction rounds to bf16; KS_E4M3 where it converts e4m3, which is float8_e4m3fnuz
// on gfx942 and float8_e4m3fn on later ones.
#pragma once

#define KS_DEVICE __device__ inline __attribute__((always_inline))
#define KS_CONSTANT extern "C" __constant__
// The attribute wants waves a vector unit.
#define KS_KERNEL(threads, blocks)                                                       \
  extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(threads, threads), \
                                            amdgpu_waves_per_eu(((blocks) * (threads) / KS_WARP + KS_SIMDS - 1) / KS_SIMDS)))

// A pointer out of a list could else point anywhere, and its loads would wait for shared memory as well.
#define KS_GLOBAL __attribute__((address_space(1)))
#define KS_LOCAL __attribute__((address_space(3)))
#define KS_SCALAR __attribute__((address_space(4)))  // read by scalar loads, where the address is uniform

static constexpr int WARP = KS_WARP;
// The load instructions write registers, which are stored to shared memory when they are wanted.
static constexpr bool COPY_THROUGH_REGISTERS = true;

typedef _Float16 f16;
typedef __bf16 bf16;
#if KS_E4M3
struct e4m3 { unsigned char bits; };
#endif

KS_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
KS_DEVICE int lane() { return thread_index() % WARP; }
KS_DEVICE int warp_index() { return __builtin_amdgcn_readfirstlane(thread_index() / WARP); }  // uniform, and known to be
KS_DEVICE unsigned block_index() { return __builtin_amdgcn_workgroup_id_x(); }
KS_DEVICE void earlier_kernels_wait() {}  // they have ended: no kernel starts early
KS_DEVICE void next_kernel_launch() {}

// x, of which the compiler must take that it could be another value every time. What follows from something fixed it
// would compute once, ahead of a loop, and keep in more registers than there are.
template<class X> KS_DEVICE X opaque(X x) {
  if constexpr (sizeof(X) == 16) {
    struct Words { int v[4]; };
    Words words = __builtin_bit_cast(Words, x);
#pragma unroll
    for (int i = 0; i < 4; i++) words.v[i] = opaque(words.v[i]);
    return __builtin_bit_cast(X, words);
  } else {
    asm volatile("" : "+v"(x));
    return x;
  }
}
KS_DEVICE int opaque_uniform(int x) {
  x = __builtin_amdgcn_readfirstlane(x);  // where the compiler does not see that it is uniform
  asm volatile("" : "+s"(x));
  return x;
}

// Of the registers for uniform values a wave has 106. With 64 lanes, whose predicates take two each, these are few, and
// values that are the same for all lanes are better kept in registers of lanes; with 32 lanes those are few.
KS_DEVICE constexpr bool few_uniform_registers() { return WARP == 64; }
KS_DEVICE int known_uniform(int x) { return WARP == 64 ? x : __builtin_amdgcn_readfirstlane(x); }
KS_DEVICE int in_lanes(int x) { return WARP == 64 ? opaque(x) : x; }
KS_DEVICE long long in_lanes(long long x) {
  struct Two { int lo, hi; };
  const Two y = __builtin_bit_cast(Two, x);
  return __builtin_bit_cast(long long, Two{opaque(y.lo), opaque(y.hi)});
}
// Still known to point to global memory.
template<class X> KS_DEVICE X* in_lanes(X* p) {
  if constexpr (WARP == 64) return (X*)(KS_GLOBAL X*)in_lanes((long long)p);
  else return p;
}

// What is in flight from global memory need not arrive for a barrier: the fences are about shared memory alone.
KS_DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
KS_DEVICE void warp_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

KS_DEVICE bool block_any(bool x) {
  __shared__ int any;
  block_barrier();  // everyone has read the last answer
  any = 0;
  block_barrier();
  if (x) any = 1;
  block_barrier();
  return __builtin_amdgcn_readfirstlane(any);
}

template<int BYTES> KS_DEVICE char* shared_memory() {
  extern __shared__ __attribute__((aligned(KS_LDS_BANKS * 4))) char memory[];
  return memory;
}

// The value of lane ^ m. Within 32 lanes a pattern in the instruction does it, beyond that an address.
KS_DEVICE int shuffle_xor(int x, int m) {
  switch (m) {
    case 1: return __builtin_amdgcn_ds_swizzle(x, 1 << 10 | 31);
    case 2: return __builtin_amdgcn_ds_swizzle(x, 2 << 10 | 31);
    case 4: return __builtin_amdgcn_ds_swizzle(x, 4 << 10 | 31);
    case 8: return __builtin_amdgcn_ds_swizzle(x, 8 << 10 | 31);
    case 16: return __builtin_amdgcn_ds_swizzle(x, 16 << 10 | 31);
    default: return __builtin_amdgcn_ds_bpermute((lane() ^ m) * 4, x);
  }
}
KS_DEVICE float shuffle_xor(float x, int m) {
  return __builtin_bit_cast(float, shuffle_xor(__builtin_bit_cast(int, x), m));
}
KS_DEVICE double shuffle_xor(double x, int m) {
  struct Two { int lo, hi; };
  const Two y = __builtin_bit_cast(Two, x);
  return __builtin_bit_cast(double, Two{shuffle_xor(y.lo, m), shuffle_xor(y.hi, m)});
}
KS_DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
KS_DEVICE double maximum(double a, double b) { return __builtin_fmax(a, b); }
KS_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
KS_DEVICE float reciprocal_fast(float x) { return __builtin_amdgcn_rcpf(x); }
KS_DEVICE float divide_fast(float x, float y) { return x / y; }
KS_DEVICE float sqrt_fast(float x) { return __builtin_sqrtf(x); }
KS_DEVICE float rsqrt_fast(float x) { return rsqrtf(x); }
KS_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
KS_DEVICE float infinity() { return __builtin_inff(); }

KS_DEVICE float to_sum(f16 x) { return (float)x; }
KS_DEVICE float to_sum(bf16 x) { return (float)x; }
KS_DEVICE float to_sum(float x) { return x; }
KS_DEVICE double to_sum(double x) { return x; }
template<class T, class S> KS_DEVICE T convert(S x) { return (T)x; }
template<class T> KS_DEVICE T zero_of() { return (T)0.f; }
#if KS_E4M3
KS_DEVICE float to_sum(e4m3 x) { return __builtin_amdgcn_cvt_f32_fp8(x.bits, 0); }
template<> KS_DEVICE e4m3 zero_of<e4m3>() { return {0}; }
#ifdef __gfx942__
static constexpr float LARGEST_E4M3 = 240.f;
#else
static constexpr float LARGEST_E4M3 = 448.f;
#endif
template<> KS_DEVICE e4m3 convert<e4m3, float>(float x) {
  const float bounded = x > LARGEST_E4M3 ? LARGEST_E4M3 : x < -LARGEST_E4M3 ? -LARGEST_E4M3 : x;
  return {(unsigned char)__builtin_amdgcn_cvt_pk_fp8_f32(bounded, bounded, 0, false)};
}
#endif

#include "tile/base.h"

// ---- sums in global memory that many blocks add to: atomics that give nothing back

template<int N> KS_DEVICE void lanes_add(float* to, const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) __builtin_amdgcn_global_atomic_fadd_f32((KS_GLOBAL float*)(to + i * WARP + lane()), x[i]);
}
template<int N> KS_DEVICE void lanes_load(float (&x)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = ((const KS_GLOBAL float*)from)[i * WARP + lane()];
}

// ---- blocks that tell each other of what they wrote

KS_DEVICE void arrival_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
KS_DEVICE int arrive(int* counter) {
  return __hip_atomic_fetch_add((KS_GLOBAL int*)counter, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

#include "engine.h"
#include "copy.h"
