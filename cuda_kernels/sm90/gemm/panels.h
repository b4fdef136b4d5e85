// Where what a lane has of a warp's 16 rows lies in a panel of 128 bytes a row, in the 128-byte swizzle.
#pragma once
#include "sm90/gemm/block.h"

// Adds two neighbouring elements of a panel to their accumulators.
KS_DEVICE void add_pair(float* d, u32 pair, float factor) {
  const TC* x = (const TC*)&pair;
  d[0] = fmaf(factor, to_sum(x[0]), d[0]), d[1] = fmaf(factor, to_sum(x[1]), d[1]);
}

// Offsets for ldmatrix and stmatrix: this lane's row of a warp's 16 rows of a panel, and its chunk, 2j + lane/16 for the columns
// of accumulators 8j … 8j + 7.
KS_DEVICE u32 row_offset(int lane) { return (lane & 15) * 128; }
KS_DEVICE u32 chunk_offset(int lane, int j) { return ((2 * j + (lane >> 4)) ^ (lane & 7)) * 16; }

// Of float32: where in a warp's 16 rows of a panel the first of two neighbours lies that a lane holds of row lane/4 + 8·half,
// of the panel's columns 8j … 8j + 7.
KS_DEVICE u32 pair_offset(int lane, int j, int half) {
  const int row = lane >> 2;
  return (row + 8 * half) * 128 + ((2 * j + (lane >> 1 & 1)) ^ row) * 16 + (lane & 1) * 8;
}

// Where a byte of a row of a panel lies in its buffer: in rows of 128 bytes, or of 64 in either half of it, each in the swizzle of
// that width; or in rows of another width, without one.
template<int BOX_BYTES> KS_DEVICE int byte_place(int row, int byte) {
  if constexpr (BOX_BYTES != 128 && BOX_BYTES != 64) return row * BOX_BYTES + byte;
  if constexpr (BOX_BYTES == 128) return row * 128 + ((byte / 16) ^ (row & 7)) * 16 + byte % 16;
  return byte / 64 * (ROWS_BYTES / 2) + row * 64 + ((byte % 64 / 16) ^ (row >> 1 & 3)) * 16 + byte % 16;
}

// The same of a chunk of 16 bytes, counted on from one panel to the next, in fewer registers.
template<int BOX_BYTES> KS_DEVICE int chunk_place(int row, int chunk) {
  if constexpr (BOX_BYTES != 128 && BOX_BYTES != 64) return row * BOX_BYTES + chunk * 16;
  if constexpr (BOX_BYTES == 128) return row * 128 + ((chunk ^ row) & 7) * 16;
  return (chunk >> 2 & 1) * (ROWS_BYTES / 2) + row * 64 + ((chunk ^ row >> 1) & 3) * 16;
}

// Writes results of pairs of neighbours (expression.h): a lane has column lane % 4 of every 4 of the panel, of which these are the
// j-th quarter.
template<int BOX_BYTES> KS_DEVICE void store_apart(char* panel, const float* acc, int j, int lane) {
  constexpr int FOURS = C_COLUMNS / 16;
  const int row = lane >> 2;
#pragma unroll
  for (int n = FOURS * j; n < FOURS * (j + 1); n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int place = byte_place<BOX_BYTES>(row + 8 * half, (4 * n + (lane & 3)) * (int)sizeof(TC));
      *(TC*)(panel + place) = convert<TC>(acc[4 * n + 2 * half]);
    }
}

// Writes the j-th quarter of a panel of 8 bits: a lane has columns 2q and 2q + 1 of every 8.
template<int BOX_BYTES> KS_DEVICE void store_bytes(char* panel, const float* acc, int j, int lane) {
  constexpr int EIGHTS = C_COLUMNS / 32;
#pragma unroll
  for (int n = EIGHTS * j; n < EIGHTS * (j + 1); n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      char* const to = panel + byte_place<BOX_BYTES>((lane >> 2) + 8 * half, 8 * n + 2 * (lane & 3));
      *(unsigned short*)to = pack_e4m3(acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]);
    }
}
