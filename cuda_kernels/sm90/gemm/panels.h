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

// Writes results of pairs of neighbours (expression.h): a lane has column lane % 4 of every 4 of the panel, of which these are the
// j-th quarter.
KS_DEVICE void store_apart(char* panel, const float* acc, int j, int lane) {
  constexpr int FOURS = C_COLUMNS / 16;
  const int row = lane >> 2;
#pragma unroll
  for (int n = FOURS * j; n < FOURS * (j + 1); n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int byte = (4 * n + (lane & 3)) * (int)sizeof(TC);
      *(TC*)(panel + (row + 8 * half) * 128 + ((byte / 16) ^ row) * 16 + byte % 16) = convert<TC>(acc[4 * n + 2 * half]);
    }
}
