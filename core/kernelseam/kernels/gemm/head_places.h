// Where the heads lie that the columns of the projection to q, k and v are, token by token: the shared kernel's and vendors' own.
#pragma once
#include "tile/tile.h"
#include "generated/config.h"

// Heads in three places, each from head `first` on. An argument of the kernel, passed whole.
struct Segments {
  struct { void* base; i64 batch, head; int row, first; } of[3];
};

// ORDER: which element of a head each column holds.
template<class ORDER> struct HeadPlaces {
  Segments operands;  // q, k and v; a row is a token
  const float *cosines, *sines;
  const int *positions, *table;
  i64 positions_batch;
  int positions_row, table_row, rotary_row, first_position;
  ORDER order;
  FastDivmod tokens, page;

  // A row of C: a token of an entry of the batch, and its position.
  struct Token { int entry, index, position; };
  KS_DEVICE Token token(int batch, int row) const {
    const int number = tokens.quotient(row), entry = batch + number, index = row - number * tokens.d;
    if (!Config::ROTARY && !Config::PAGED) return {entry, index, 0};
    const int position = Config::POSITIONS ? positions[entry * positions_batch + (i64)index * positions_row] : first_position + index;
    return {entry, index, position};
  }
};
