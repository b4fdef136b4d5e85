// Scales of a GEMM's factors of 8 bits, an argument of the kernel that is passed whole: of A's rows, by A's batch and head, and of B's
// columns, by B's; or lists of them. Where SCALE_K is not 0: of blocks of SCALE_M rows, or SCALE_N columns, and SCALE_K
// values of k.
#pragma once
#include "generated/config.h"
#include "tile/tile.h"

struct Scales {
  struct {
    const float* base;
    i64 batch, head;
    int row, k;  // k: of blocks
  } a, b;
};
