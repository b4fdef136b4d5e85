// Where a block finds the rows of its sequence and head, whatever view they are given by.
#pragma once
#include "attention/scores.h"

enum { STRIDED, PACKED, PAGED, POINTERS };

// One entry of the batch: how many queries and keys it has, and where its first ones lie in packed memory.
struct Sequence {
  int S_q, S_k, q_first, k_first;
};

KS_DEVICE Sequence sequence_of(int batch, int S_q, int S_k, const int* q_offsets, const int* k_offsets,
                               const int* lengths) {
  Sequence s{S_q, S_k, 0, 0};
  if (Config::Q_VIEW == PACKED) s.q_first = q_offsets[batch], s.S_q = q_offsets[batch + 1] - s.q_first;
  if (Config::KV_VIEW == PACKED) s.k_first = k_offsets[batch], s.S_k = k_offsets[batch + 1] - s.k_first;
  if (Config::LENGTHS) s.S_k = min_of(lengths[batch], s.S_k);
  return s;
}

// What the strides mean depends on the view; a list's entry is its own matrix.
template<int VIEW, class T>
KS_DEVICE T* matrix(T* base, int batch, int head, int heads, int first, i64 batch_stride, i64 head_stride, int row) {
  if (VIEW == POINTERS) return listed(base, (i64)batch * heads + head);
  if (VIEW == PACKED) return base + (i64)first * row + head * head_stride;
  if (VIEW == PAGED) return base + head * head_stride;
  return base + batch * batch_stride + head * head_stride;
}

// The rows of a head. Of its arguments and not of a structure: the order in which members are read costs registers on sm_80.
template<class T> KS_DEVICE StridedView<T> rows_of(T* base, int head, i64 head_stride, int row) {
  return {base + head * head_stride, row};
}

// ---- what a kernel's body is given; strides in elements

// An operand: a matrix for each head of each entry of the batch.
template<class T> struct Matrices {
  T* base;
  i64 batch, head;
  int row;
  // Of `heads` a batch; `first`: where its sequence begins in packed memory.
  template<int VIEW> KS_DEVICE T* at(int b, int h, int heads, int first) const {
    return matrix<VIEW>(base, b, h, heads, first, batch, head, row);
  }
  // The rows of a head, where `base` is its entry's.
  KS_DEVICE StridedView<T> rows(int h) const { return rows_of(base, h, head, row); }
};

// A number for each row of queries, as the log-sum-exp.
template<class T> struct RowValues {
  T* base;
  i64 batch, head;
};

template<class T> KS_DEVICE Matrices<T> in_lanes(Matrices<T> m) {
  return {in_lanes(m.base), in_lanes(m.batch), in_lanes(m.head), in_lanes(m.row)};
}
template<class T> KS_DEVICE RowValues<T> in_lanes(RowValues<T> r) {
  return {in_lanes(r.base), in_lanes(r.batch), in_lanes(r.head)};
}

// The extents; S_q and S_k of the longest, where sequences differ in length.
struct Sequences {
  const int *lengths, *q_offsets, *k_offsets;
  int S_q, S_k;
  KS_DEVICE Sequence at(int batch) const { return sequence_of(batch, S_q, S_k, q_offsets, k_offsets, lengths); }
};

// The block table of paged keys and values.
struct Pages {
  const int* table;
  i64 table_row;
  FastDivmod size;
};
