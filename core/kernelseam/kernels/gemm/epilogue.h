// What becomes of a GEMM's sums before they are rounded: a generated expression (generated/epilogue.h) of each, or of a pair of
// columns. HALVES, columns n and n + N/2: a tile has BN/2 columns of either half, and a lane holds both sums of a pair, as
// accumulators of two products. NEIGHBOURS: 2n and 2n + 1. A result of pairs has half the columns.
#pragma once
#include "tile/tile.h"
#include "generated/config.h"
#include "generated/epilogue.h"

enum { HALVES = 1, NEIGHBOURS = 2 };

// Where results lie, and how they are counted.
struct EpilogueResults {
  void* preactivation;  // the first of what the epilogue is of, or a list
  i64 batch, head;
  int row, first_row, by_batch, by_head;

  // Of results counted by batch and head: the number that the epilogue is given, and the row that a matrix begins with. (A tall
  // matrix may be walked as several heads, its bands.)
  KS_DEVICE int number(int batch, int head) const { return batch * by_batch + head * by_head; }
  KS_DEVICE int rows_before(int head) const { return head * first_row; }
};

// An argument of the kernel, passed whole: with what the epilogue captures, if it does.
template<bool CAPTURES> struct EpilogueArgument {
  EpilogueResults results;
  KS_DEVICE Epilogue captured() const { return {}; }
};
template<> struct EpilogueArgument<true> {
  Epilogue epilogue;
  EpilogueResults results;
  KS_DEVICE Epilogue captured() const { return epilogue; }
};
typedef EpilogueArgument<Config::CAPTURES> EpilogueArguments;
