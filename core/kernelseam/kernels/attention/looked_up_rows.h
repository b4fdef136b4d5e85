// Rows of keys and of values in pages, whose places a warp looked up in the block table before they are copied.
#pragma once
#include "attention/sequences.h"

// Where they begin, in elements from their matrices' first.
struct PageRow { i64 k, v; };
// COUNT rows from number `first` on; those behind are the last.
template<class X, int COUNT, i64 PageRow::*OF> struct LookedUpView {
  X* base;
  const PageRow* rows;
  int first;
  KS_DEVICE X* row(int i) const { return base + rows[min_of(i - first, COUNT - 1)].*OF; }
  template<int STEP> KS_DEVICE RowByRow<LookedUpView, X, STEP> walk(int i) const { return {*this, row(i), i}; }
};
