// CDNA: matrix instructions of 16×16, accumulators held transposed (a lane has one row).
// Lane 16·g + i, g = 0…3, gives the instruction 4 (gfx950, and of e4m3: 8) values of k to the outer index i, and receives the sums
// of the left factor's row i with the right factor's outer indices 4·g … 4·g + 3.
//
// Blocks come in pairs, 32 columns: the outer indices that an instruction is given are chosen so that a lane's sums in
// a pair are 8 neighbours, 8·g … 8·g + 7 — which is also how a lane holds 32 values of k. So accumulators are an
// operand as they lie, and everything moves 16 bytes at a time. A single last block of 16 has 4 neighbours a lane.
#pragma once

typedef float Sums __attribute__((ext_vector_type(4)));
typedef unsigned Fragment __attribute__((ext_vector_type(4)));      // 8 elements of 16 bits, k = 8·g …; of 8 bits twice as many
typedef unsigned HalfFragment __attribute__((ext_vector_type(2)));  // half as many
static constexpr int BLOCK_SUMS = 4, UNIT_K = 32, FRAGMENTS_AHEAD = 0;

// The first column of a lane's sums in block b of an accumulator with C columns.
template<int C> KS_DEVICE int sums_column(int b) {
  const int g = lane() / 16;
  return b < C / 32 * 2 ? b / 2 * 32 + 8 * g + b % 2 * 4 : 16 * b + 4 * g;
}
// The outer index of the right factor that this lane gives to block b: the sum of the lane's part and the block's.
template<int C> KS_DEVICE int outer_index(int b) {
  const int i = lane() % 16;
  return b < C / 32 * 2 ? i / 4 * 8 + i % 4 : i;
}
template<int C> KS_DEVICE constexpr int outer_block(int b) { return b < C / 32 * 2 ? b / 2 * 32 + b % 2 * 4 : 16 * b; }

template<class T> struct Instruction;
template<> struct Instruction<f16> {
  typedef _Float16 Four __attribute__((ext_vector_type(4)));
  typedef _Float16 Eight __attribute__((ext_vector_type(8)));
  static KS_DEVICE Sums run(HalfFragment outer, HalfFragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Four, outer), __builtin_bit_cast(Four, row), c, 0, 0, 0);
  }
#if KS_MFMA_K == 32
  static KS_DEVICE Sums run(Fragment outer, Fragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(Eight, outer), __builtin_bit_cast(Eight, row), c, 0, 0, 0);
  }
#endif
};
template<> struct Instruction<bf16> {
  typedef short Four __attribute__((ext_vector_type(4)));
  typedef __bf16 Eight __attribute__((ext_vector_type(8)));
  static KS_DEVICE Sums run(HalfFragment outer, HalfFragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Four, outer), __builtin_bit_cast(Four, row), c, 0, 0, 0);
  }
#if KS_MFMA_K == 32
  static KS_DEVICE Sums run(Fragment outer, Fragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(Eight, outer), __builtin_bit_cast(Eight, row), c, 0, 0, 0);
  }
#endif
};

#if KS_E4M3
template<> struct Instruction<e4m3> {
  static KS_DEVICE Sums run(HalfFragment outer, HalfFragment row, Sums c) {
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, outer), __builtin_bit_cast(long, row), c, 0, 0, 0);
  }
};
#endif

// 32 values of k, of e4m3 64. Where an instruction takes half as many, the order of k is free as long as both factors share it.
template<class T> KS_DEVICE Sums multiply(Fragment outer, Fragment row, Sums c) {
  if constexpr (KS_MFMA_K == 32 && sizeof(T) == 2) return Instruction<T>::run(outer, row, c);
  else return Instruction<T>::run(outer.hi, row.hi, Instruction<T>::run(outer.lo, row.lo, c));
}
template<class T> KS_DEVICE Sums multiply(HalfFragment outer, HalfFragment row, Sums c) {
  return Instruction<T>::run(outer, row, c);
}

// A lane's share of a unit of k, or of the last half of one, from the row whose element `from(i, k)` is that at k + i.
template<class From> KS_DEVICE Fragment load_unit(From from, int k) {
  return *(const Fragment*)from(lane() / 16 * (16 / (int)sizeof(*from(0, 0))), k);
}
template<class From> KS_DEVICE HalfFragment load_tail(From from, int k) {
  return *(const HalfFragment*)from(lane() / 16 * (8 / (int)sizeof(*from(0, 0))), k);
}

// The sums of a pair of blocks, rounded, as UNIT_K values of k; and of a single last block.
template<class T> KS_DEVICE Fragment pack_unit(const Sums* x) {
  return {pack<T>(x[0].x, x[0].y), pack<T>(x[0].z, x[0].w), pack<T>(x[1].x, x[1].y), pack<T>(x[1].z, x[1].w)};
}
template<class T> KS_DEVICE HalfFragment pack_tail(Sums x) { return {pack<T>(x.x, x.y), pack<T>(x.z, x.w)}; }
