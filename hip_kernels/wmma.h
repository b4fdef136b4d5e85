// RDNA: matrix instructions of 16×16×16, wave32, accumulators held transposed (a lane has one row).
// Lane 16·g + i, g = 0, 1, receives 8 sums of the left factor's row i: with the right factor's outer indices
// 8·g … 8·g + 7 on gfx12, with g, g + 2, … on gfx11. There the outer indices that the instruction is given are permuted,
// so that on both a lane's sums are 8 neighbours.
// On gfx12 a lane gives the 8 values of k from 8·g (of e4m3 two instructions' at once, 16), on gfx11 all 16 (both halves of a wave hold the same).
#pragma once

typedef float Sums __attribute__((ext_vector_type(8)));
#if KS_WMMA == 11
typedef unsigned Fragment __attribute__((ext_vector_type(8)));
#else
typedef unsigned Fragment __attribute__((ext_vector_type(4)));
#endif
static constexpr int BLOCK_SUMS = 8, UNIT_K = 16, FRAGMENTS_AHEAD = 64 / (int)sizeof(Fragment);
typedef Fragment HalfFragment;  // of a last half unit: there is none, a unit is 16

template<int C> KS_DEVICE int sums_column(int b) { return 16 * b + lane() / 16 * 8; }
template<int C> KS_DEVICE int outer_index(int) {
  const int i = lane() % 16;
  return KS_WMMA == 11 ? i % 2 * 8 + i / 2 : i;
}
template<int C> KS_DEVICE constexpr int outer_block(int b) { return 16 * b; }

template<class T> struct Instruction;
template<> struct Instruction<f16> {
  typedef _Float16 Lanes __attribute__((ext_vector_type(sizeof(Fragment) / 2)));
  static KS_DEVICE Sums run(Lanes outer, Lanes row, Sums c) {
#if KS_WMMA == 11
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(outer, row, c);
#else
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(outer, row, c);
#endif
  }
};
template<> struct Instruction<bf16> {
  typedef short Lanes __attribute__((ext_vector_type(sizeof(Fragment) / 2)));
  static KS_DEVICE Sums run(Lanes outer, Lanes row, Sums c) {
#if KS_WMMA == 11
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(outer, row, c);
#else
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(outer, row, c);
#endif
  }
};
#if KS_E4M3
template<> struct Instruction<e4m3> {
  typedef int Lanes __attribute__((ext_vector_type(2)));
  static KS_DEVICE Sums run(Lanes outer, Lanes row, Sums c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(outer, row, c);
  }
};
#endif
template<class T> KS_DEVICE Sums multiply(Fragment outer, Fragment row, Sums c) {
  typedef typename Instruction<T>::Lanes Lanes;
  if constexpr (sizeof(Lanes) < sizeof(Fragment)) {  // the order of k is free as long as both factors share it
    auto half = [](auto x) { return __builtin_bit_cast(Lanes, x); };
    return Instruction<T>::run(half(outer.hi), half(row.hi), Instruction<T>::run(half(outer.lo), half(row.lo), c));
  } else
  return Instruction<T>::run(__builtin_bit_cast(Lanes, outer), __builtin_bit_cast(Lanes, row), c);
}

typedef unsigned Words __attribute__((ext_vector_type(4)));
template<class From> KS_DEVICE Fragment load_unit(From from, int k) {
#if KS_WMMA == 11
  const Words lo = *(const Words*)from(0, k), hi = *(const Words*)from(0, k + 8);
  return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return *(const Words*)from(lane() / 16 * (16 / (int)sizeof(*from(0, 0))), k);
#endif
}
template<class From> KS_DEVICE HalfFragment load_tail(From from, int k) { return load_unit(from, k); }

// The sums of a block, rounded, as 16 values of k.
template<class T> KS_DEVICE Fragment pack_unit(const Sums* x) {
  const Words mine = {pack<T>(x->s0, x->s1), pack<T>(x->s2, x->s3), pack<T>(x->s4, x->s5), pack<T>(x->s6, x->s7)};
#if KS_WMMA == 11
  // The other half of the wave has the other 8: the same lane of the other row of 16.
  Words other;
#pragma unroll
  for (int i = 0; i < 4; i++)
    other[i] = __builtin_amdgcn_permlanex16(mine[i], mine[i], 0x76543210, 0xfedcba98, false, false);
  const bool upper = lane() / 16;
  const Words lo = upper ? other : mine, hi = upper ? mine : other;
  return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return mine;
#endif
}
template<class T> KS_DEVICE HalfFragment pack_tail(Sums x) { return pack_unit<T>(&x); }
