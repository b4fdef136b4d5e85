// Where a matrix lies in a tensor map over all of a batch, or over all of memory.
#pragma once
#include "sm90/ptx.h"

// A matrix in a tensor map: the coordinates of its last two axes. These are head and batch; or, for lists, units of 16 bytes and
// of 2^35 bytes from the origin, which reach every address, modulo 2^64.
struct Matrix { int x2, x3; };
KS_DEVICE Matrix matrix_at(const void* address, const void* origin) {
  const u64 units = ((u64)address - (u64)origin) >> 4;
  return {(int)(units & 0x7fffffff), (int)(units >> 31)};
}
