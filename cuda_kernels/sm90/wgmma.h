// Warpgroup matrix multiplication (wgmma): m64nNk16, half-precision operands, m64nNk8, TF32, or m64nNk32, e4m3; float32 accumulators. Operand B is in shared
// memory, A in shared memory or registers. It is asynchronous, from the commit to a wait.
//
// An accumulator of 64×n is n/2 registers a thread: per 8 columns the fragment of mma.sync's m16n8, with
// rows lane/4 and lane/4 + 8 of the warp's 16. So accumulators 8i … 8i + 7, rounded to 16 bits, are the A fragment of k16 step i.
//
// Tiles in shared memory are panels of 64 columns, rows of 128 bytes, in the 128-byte swizzle of TMA: the 16-byte chunk c of
// row r lies at c ^ (r % 8). They start at multiples of 1024 bytes.
#pragma once
#include "sm90/ptx.h"

// Descriptor of an operand, 64 bits: address/16 | leading offset/16 << 16 | stride offset/16 << 32 | 128-byte swizzle. Stride
// offset: 1024 bytes, from 8 rows to the next 8. The high half is a constant, so a descriptor is kept as its low half, and
// advancing it is one 32-bit addition. In a cluster an address has the block's rank from bit 24 on, which is not
// part of it.
#define KS_DESCRIPTOR_HIGH "0x40000040"
// The high half for rows of ROW bytes, which are 128, or 64 in the 64-byte swizzle: 512 bytes from 8 rows to the next 8.
template<int ROW> constexpr u32 descriptor_high = ROW == 64 ? 0x80000020 : 0x40000040;

// K-major (Q, K): the next k16 step is 32 bytes on, in a panel.
KS_DEVICE u32 descriptor_k_major(u32 address) { return 1u << 16 | (address & 0x3ffff) >> 4; }
// MN-major (V): the next k16 step is 16 rows on. `panel`: bytes between panels of 64 columns.
KS_DEVICE u32 descriptor_mn_major(u32 address, int panel) { return panel >> 4 << 16 | (address & 0x3ffff) >> 4; }
KS_DEVICE u32 advanced(u32 descriptor, int bytes) { return descriptor + (bytes >> 4); }
// A whole descriptor: the compiler then adds to one base where a product has many, and moves no high half for each.
template<int EIGHT_ROWS = 1024> KS_DEVICE u64 whole(u32 descriptor) {
  return (u64)(0x40000000 | EIGHT_ROWS / 16) << 32 | descriptor;
}
KS_DEVICE u64 advanced(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

// Before the first wgmma, and after writes to registers that it uses.
KS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KS_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups are pending.
template<int N> KS_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

// The instruction names each register of the accumulator. KS_R(n): the first n/2 of d by place, KS_D(n): the operands.
#define KS_R8 "%0, %1, %2, %3"
#define KS_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KS_R32 KS_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KS_R48 KS_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define KS_R64 KS_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define KS_R80 KS_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define KS_R96 KS_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define KS_R112 KS_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define KS_R128 KS_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define KS_R144 KS_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define KS_R160 KS_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define KS_R176 KS_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define KS_R192 KS_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define KS_R208 KS_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define KS_R224 KS_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define KS_R240 KS_R224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define KS_R256 KS_R240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define KS_EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define KS_D8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define KS_D16 KS_EIGHT(0)
#define KS_D32 KS_D16, KS_EIGHT(8)
#define KS_D48 KS_D32, KS_EIGHT(16)
#define KS_D64 KS_D48, KS_EIGHT(24)
#define KS_D80 KS_D64, KS_EIGHT(32)
#define KS_D96 KS_D80, KS_EIGHT(40)
#define KS_D112 KS_D96, KS_EIGHT(48)
#define KS_D128 KS_D112, KS_EIGHT(56)
#define KS_D144 KS_D128, KS_EIGHT(64)
#define KS_D160 KS_D144, KS_EIGHT(72)
#define KS_D176 KS_D160, KS_EIGHT(80)
#define KS_D192 KS_D176, KS_EIGHT(88)
#define KS_D208 KS_D192, KS_EIGHT(96)
#define KS_D224 KS_D208, KS_EIGHT(104)
#define KS_D240 KS_D224, KS_EIGHT(112)
#define KS_D256 KS_D240, KS_EIGHT(120)

// Whether d is added to must be a predicate: with an immediate there the compiler crashes. `make`: the 64-bit x and y.
#define KS_WGMMA_WHOLE(n, type, a, b, add, tail) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" KS_R##n "}, " a ", %" #b ", p, " tail ";\n}"
#define KS_WGMMA(n, k, type, make, a, add, tail) KS_WGMMA_OF(n, k, type, KS_DESCRIPTOR_HIGH, make, a, add, tail)
#define KS_WGMMA_HIGH(n, k, type, high, make, a, add, tail) KS_WGMMA_OF(n, k, type, "%" #high, make, a, add, tail)
#define KS_WGMMA_OF(n, k, type, high, make, a, add, tail) \
  "{\n.reg .pred p;\n.reg .b32 high;\n.reg .b64 x, y;\nsetp.ne.b32 p, %" #add ", 0;\n" \
  "mov.b32 high, " high ";\n" make \
  "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." type "." type " {" KS_R##n "}, " a ", y, p, " tail ";\n}"
#define KS_WIDE(x, low) "mov.b64 " x ", {%" #low ", high};\n"

template<class T, int N> struct Wgmma;

// ss: A and B in shared memory; A_M, B_N: 1 where MN-major, 0 where K-major. rs: A in registers, B
// contiguous along n. ROW: bytes of a row in shared memory, of 16-bit operands 128.
#define KS_WGMMA_SHAPE(T, type, n, o0, o1, o2, o3, o4, o5, ...) \
  template<> struct Wgmma<T, n> { \
    template<int A_M = 0, int B_N = 0, int ROW = 128> static KS_DEVICE void ss(float (&d)[n / 2], u32 a, u32 b, int add) { \
      asm volatile(KS_WGMMA(n, 16, type, KS_WIDE("x", o0) KS_WIDE("y", o1), "x", o2, "1, 1, %" #o3 ", %" #o4) \
                   : KS_D##n : "r"(a), "r"(b), "r"(add), "n"(A_M), "n"(B_N)); \
    } \
    template<int A_M = 0, int B_N = 0, int ROW = 128> static KS_DEVICE void ss(float (&d)[n / 2], u64 a, u64 b, int add) { \
      asm volatile(KS_WGMMA_WHOLE(n, type, "%" #o0, o1, o2, "1, 1, %" #o3 ", %" #o4) \
                   : KS_D##n : "l"(a), "l"(b), "r"(add), "n"(A_M), "n"(B_N)); \
    } \
    template<int ROW = 128> static KS_DEVICE void rs(float (&d)[n / 2], const u32* a, u64 b, int add) { \
      asm volatile(KS_WGMMA_WHOLE(n, type, "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}", o4, o5, "1, 1, 1") \
                   : KS_D##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)); \
    } \
    template<int ROW = 128> static KS_DEVICE void rs(float (&d)[n / 2], const u32* a, u32 b, int add) { \
      asm volatile(KS_WGMMA(n, 16, type, KS_WIDE("y", o4), "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}", o5, "1, 1, 1") \
                   : KS_D##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    } \
  };

// float32 as TF32, of which the units read a sign, 8 bits of exponent and 10 behind the point: m64nNk8, both contiguous along k.
#define KS_WGMMA_TF32(n, o0, o1, o2, o3, o4, o5, ...) \
  template<> struct Wgmma<float, n> { \
    template<int A_M = 0, int B_N = 0> static KS_DEVICE void ss(float (&d)[n / 2], u32 a, u32 b, int add) { \
      static_assert(!A_M && !B_N, "TF32 lies along k in shared memory"); \
      asm volatile(KS_WGMMA(n, 8, "tf32", KS_WIDE("x", o0) KS_WIDE("y", o1), "x", o2, "1, 1") \
                   : KS_D##n : "r"(a), "r"(b), "r"(add)); \
    } \
    static KS_DEVICE void rs(float (&d)[n / 2], const u32* a, u32 b, int add) { \
      asm volatile(KS_WGMMA(n, 8, "tf32", KS_WIDE("y", o4), "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}", o5, "1, 1") \
                   : KS_D##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add)); \
    } \
  };

#if KS_E4M3
// e4m3: m64nNk32, both contiguous along k, in rows of ROW bytes. Of a sum the units keep about 13 bits.
#define KS_WGMMA_E4M3(n, o0, o1, o2, o3, o4, o5, o6, ...) \
  template<> struct Wgmma<e4m3, n> { \
    template<int A_M = 0, int B_N = 0, int ROW = 128> static KS_DEVICE void ss(float (&d)[n / 2], u32 a, u32 b, int add) { \
      static_assert(!A_M && !B_N, "e4m3 lies along k in shared memory"); \
      asm volatile(KS_WGMMA_HIGH(n, 32, "e4m3", o3, KS_WIDE("x", o0) KS_WIDE("y", o1), "x", o2, "1, 1") \
                   : KS_D##n : "r"(a), "r"(b), "r"(add), "n"(descriptor_high<ROW>)); \
    } \
    template<int ROW = 128> static KS_DEVICE void rs(float (&d)[n / 2], const u32* a, u32 b, int add) { \
      asm volatile(KS_WGMMA_HIGH(n, 32, "e4m3", o6, KS_WIDE("y", o4), "{%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}", o5, "1, 1") \
                   : KS_D##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(descriptor_high<ROW>)); \
    } \
  };

// Two float32 to e4m3, the first in the lower byte, to nearest even; of what is larger, 448.
KS_DEVICE unsigned short pack_e4m3(float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

// Four float32 to e4m3, the first in the lowest byte, to nearest even; of what is larger, 448.
KS_DEVICE u32 pack4(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(r) : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
#endif

// ---- products of several steps along k

// Four steps in one statement, as each statement that names an accumulator's registers takes 2 to 3 ms to compile. A_STEP, B_STEP: bytes
// from one step to the next; the rest as Wgmma.
template<class T, int N> struct WgmmaFour;

#define KS_LOW(x, i, by) "add.s32 low, %" #i ", " by ";\nmov.b64 " x ", {low, high};\n"
#define KS_ALL(x, i, by) "add.s64 " x ", %" #i ", " by ";\n"
#define KS_FOUR(high, add, steps) \
  "{\n.reg .pred p, q;\n.reg .b32 low, high;\n.reg .b64 x, y;\nmov.b32 high, %" #high ";\n" \
  "setp.ne.b32 p, %" #add ", 0;\nsetp.eq.b32 q, 0, 0;\n" steps "}"
#define KS_FOUR_STEP(n, k, type, a, add, tail) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." type "." type " {" KS_R##n "}, " a ", y, " add ", " tail ";\n"
#define KS_STEP_SS(n, k, type, make, a, b, by_a, by_b, add, tail) make("x", a, by_a) make("y", b, by_b) KS_FOUR_STEP(n, k, type, "x", add, tail)
#define KS_STEP_RS(n, k, type, make, a0, a1, a2, a3, b, by, add, tail) \
  make("y", b, by) KS_FOUR_STEP(n, k, type, "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}", add, tail)
#define KS_MAJOR(a, b) "1, 1, %" #a ", %" #b
#define KS_CONTIGUOUS(a, b) "1, 1"
#define KS_FOUR_SS(n, k, type, D, letter, make, tail, o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, ...) \
    template<int A_STEP, int B_STEP, int A_M = 0, int B_N = 0, int ROW = 128> static KS_DEVICE void ss(float (&d)[n / 2], D a, D b, int add) { \
      asm volatile(KS_FOUR(o9, o2, KS_STEP_SS(n, k, type, make, o0, o1, "0", "0", "p", tail(o10, o11)) \
                                   KS_STEP_SS(n, k, type, make, o0, o1, "%" #o3, "%" #o6, "q", tail(o10, o11)) \
                                   KS_STEP_SS(n, k, type, make, o0, o1, "%" #o4, "%" #o7, "q", tail(o10, o11)) \
                                   KS_STEP_SS(n, k, type, make, o0, o1, "%" #o5, "%" #o8, "q", tail(o10, o11))) \
                   : KS_D##n : letter(a), letter(b), "r"(add), "n"(A_STEP / 16), "n"(A_STEP / 8), "n"(3 * A_STEP / 16), "n"(B_STEP / 16), \
                   "n"(B_STEP / 8), "n"(3 * B_STEP / 16), "n"(descriptor_high<ROW>), "n"(A_M), "n"(B_N)); \
    }
#define KS_FOUR_RS(n, k, type, D, letter, make, tail, o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, o10, o11, o12, o13, o14, o15, o16, o17, o18, \
                   o19, o20, o21) \
    template<int B_STEP, int ROW = 128> static KS_DEVICE void rs(float (&d)[n / 2], const u32* a, D b, int add) { \
      asm volatile(KS_FOUR(o21, o17, KS_STEP_RS(n, k, type, make, o0, o1, o2, o3, o16, "0", "p", tail) \
                                     KS_STEP_RS(n, k, type, make, o4, o5, o6, o7, o16, "%" #o18, "q", tail) \
                                     KS_STEP_RS(n, k, type, make, o8, o9, o10, o11, o16, "%" #o19, "q", tail) \
                                     KS_STEP_RS(n, k, type, make, o12, o13, o14, o15, o16, "%" #o20, "q", tail)) \
                   : KS_D##n : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), \
                   "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), letter(b), "r"(add), "n"(B_STEP / 16), \
                   "n"(B_STEP / 8), "n"(3 * B_STEP / 16), "n"(descriptor_high<ROW>)); \
    }
#define KS_FOUR_SHAPE(T, type, n, ...) \
  template<> struct WgmmaFour<T, n> { \
    KS_FOUR_SS(n, 16, type, u32, "r", KS_LOW, KS_MAJOR, __VA_ARGS__) KS_FOUR_SS(n, 16, type, u64, "l", KS_ALL, KS_MAJOR, __VA_ARGS__) \
    KS_FOUR_RS(n, 16, type, u32, "r", KS_LOW, "1, 1, 1", __VA_ARGS__) KS_FOUR_RS(n, 16, type, u64, "l", KS_ALL, "1, 1, 1", __VA_ARGS__) \
  };
#define KS_FOUR_E4M3(n, ...) \
  template<> struct WgmmaFour<e4m3, n> { \
    KS_FOUR_SS(n, 32, "e4m3", u32, "r", KS_LOW, KS_CONTIGUOUS, __VA_ARGS__) KS_FOUR_RS(n, 32, "e4m3", u32, "r", KS_LOW, "1, 1", __VA_ARGS__) \
  };

// The shapes that a binary uses, as KS_SHAPES: of each of n columns KS_SHAPE(n, n/2, n/2 + 1, …), the places of operands behind the accumulator's.
// The front end takes 4 ms to read one.
#define KS_SHAPE_WIDER(n, ...) \
  KS_WGMMA_SHAPE(f16, "f16", n, __VA_ARGS__) KS_WGMMA_SHAPE(bf16, "bf16", n, __VA_ARGS__) KS_WGMMA_TF32(n, __VA_ARGS__) \
  KS_FOUR_SHAPE(f16, "f16", n, __VA_ARGS__) KS_FOUR_SHAPE(bf16, "bf16", n, __VA_ARGS__)
#if KS_E4M3
#define KS_SHAPE(n, ...) KS_SHAPE_WIDER(n, __VA_ARGS__) KS_WGMMA_E4M3(n, __VA_ARGS__) KS_FOUR_E4M3(n, __VA_ARGS__)
#else
#define KS_SHAPE KS_SHAPE_WIDER
#endif
#ifdef KS_SHAPES
KS_SHAPES
#endif

// d = a·b, or added to d, over STEPS steps along k. Panels of PER steps: A_STEP, B_STEP bytes from a step to the next in a panel, A_PANEL,
// B_PANEL from a panel to the next.
template<class T, int N, int STEPS, int A_PANEL, int B_PANEL, int A_STEP = 32, int B_STEP = 32, int A_M = 0, int B_N = 0, int ROW = 128, class D>
KS_DEVICE void multiply_ss(float (&d)[N / 2], D a, D b, bool add) {
  constexpr int PER = ROW / 32, WHOLE = PER == 4 ? STEPS / 4 * 4 : 0;
#pragma unroll
  for (int k = 0; k < WHOLE; k += 4)
    WgmmaFour<T, N>::template ss<A_STEP, B_STEP, A_M, B_N, ROW>(d, advanced(a, k / PER * A_PANEL), advanced(b, k / PER * B_PANEL), add || k);
#pragma unroll
  for (int k = WHOLE; k < STEPS; k++)
    Wgmma<T, N>::template ss<A_M, B_N, ROW>(d, advanced(a, k / PER * A_PANEL + k % PER * A_STEP),
                                            advanced(b, k / PER * B_PANEL + k % PER * B_STEP), add || k);
}
// The same where A is in registers, four a step.
template<class T, int N, int STEPS, int B_STEP, int ROW = 128, class D>
KS_DEVICE void multiply_rs(float (&d)[N / 2], const u32* a, D b, bool add) {
  constexpr int WHOLE = STEPS / 4 * 4;
#pragma unroll
  for (int k = 0; k < WHOLE; k += 4) WgmmaFour<T, N>::template rs<B_STEP, ROW>(d, a + 4 * k, advanced(b, k * B_STEP), add || k);
#pragma unroll
  for (int k = WHOLE; k < STEPS; k++) Wgmma<T, N>::template rs<ROW>(d, a + 4 * k, advanced(b, k * B_STEP), add || k);
}

// Two float32 to 16 bits each, the first in the low half, rounding to nearest even.
KS_DEVICE u32 pack2(float low, float high, f16) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
KS_DEVICE u32 pack2(float low, float high, bf16) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
