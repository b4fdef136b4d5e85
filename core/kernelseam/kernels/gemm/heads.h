// The epilogue of the projection to q, k and v: C's columns are heads, which lie in three operands, token by token.
//
// Columns are numbered head after head, those of q first, then k's, then v's. Half-split rotary embedding rotates element i
// with i + n/2 (n = rotary_dim): the rows of the weight are taken in an order that makes the two neighbours. Column 2i of a
// head holds element i, column 2i + 1 element i + n/2, so a lane has both, whatever the platform; the order is undone when
// results are stored. Interleaved pairs (2i with 2i + 1) are neighbours as they are.
// (RoFormer, Su et al. 2021, arXiv:2104.09864: x_i' = x_i·cos − x_j·sin, x_j' = x_j·cos + x_i·sin.)
#pragma once
#include "gemm/head_places.h"

enum { HALF_SPLIT = 1, INTERLEAVED = 2 };

template<int N> struct Number { static constexpr int value = N; };

// Which element of a head each column holds.
struct Order {
  FastDivmod head;
  int rotated_end, rotary_dim;  // columns from rotated_end on are v's

  // Of the column that is number c of its head: all bits where it is rotated, else 0. (Arithmetic, because a condition for
  // each of the many rows that a thread copies would take more scalar registers than AMD has.)
  KS_DEVICE int rotated(int column, int c) const { return Config::ROTARY ? ((column - rotated_end) & (c - rotary_dim)) >> 31 : 0; }
  KS_DEVICE int element(int column, int c) const {
    return Config::ROTARY == HALF_SPLIT ? c + ((c / 2 + (c & 1) * (rotary_dim / 2) - c) & rotated(column, c)) : c;
  }
  // The row of the weight, and the element of the bias, of a column.
  KS_DEVICE int weight_row(int column) const {
    if (Config::ROTARY != HALF_SPLIT) return column;
    const int start = head.quotient(column) * head.d;
    return start + element(column, column - start);
  }
};

// The weight's rows in that order.
template<class T> struct OrderedRows {
  Order order;
  StridedView<T> weight;
  KS_DEVICE T* row(int n) const { return weight.row(order.weight_row(n)); }
  template<int STEP> KS_DEVICE RowByRow<OrderedRows, T, STEP> walk(int n) const { return {*this, row(n), n}; }
};

// An argument of the kernel, passed whole.
struct Heads : HeadPlaces<Order> {
  template<class T> KS_DEVICE auto weight_rows(StridedView<T> weight) const {
    if constexpr (Config::ROTARY == HALF_SPLIT) return OrderedRows<T>{order, weight};
    else return weight;
  }

  template<class Acc> KS_DEVICE void rotate(Acc& acc, int batch, int row0, int row_end, int col0, int col_end) const {
    if (!Config::ROTARY) return;
    E::map_pairs(acc, [&](int i, int j, Sum& x, Sum& y) {
      if (row0 + i >= row_end || col0 + j >= col_end) return;
      const int c = col0 + j - order.head.quotient(col0 + j) * order.head.d;
      if (!order.rotated(col0 + j, c)) return;
      const i64 at = (i64)token(batch, row0 + i).position * rotary_row + c / 2;
      const Sum cosine = cosines[at], sine = sines[at], old = x;
      x = old * cosine - y * sine;
      y = y * cosine + old * sine;
    });
  }

  // A warp's tile to its places, one operand after the other: whole chunks where a head's elements come in such, else
  // element by element.
  KS_DEVICE void copy_out(TileC tile, int batch, int row0, int row_end, int col0, int col_end) const {
    constexpr int V = Chunk<TC>::N, GROUP = Config::ROTARY == HALF_SPLIT ? 2 * V : V;
    static_assert(TileC::COLS % GROUP == 0, "rows of a tile are whole groups of chunks");
    const FastDivmod& head = order.head;
#pragma unroll 1
    for (int n = 0; n < 3; n++) {
      const auto& operand = operands.of[n];
      const int begin = max_of(operand.first * head.d, col0);
      const int end = n == 2 ? col_end : min_of(operands.of[n + 1].first * head.d, col_end);
      if (begin >= min_of(end, col0 + TileC::COLS)) continue;
      // f(row, column within the tile, its head's first element of the row's token, column within the head) for every
      // STEP-th element.
      auto each = [&](auto step, auto f) {
        constexpr int STEP = decltype(step)::value, PER_ROW = TileC::COLS / STEP;
#pragma unroll 1
        for (int i = lane(); i < TileC::ROWS * PER_ROW; i += WARP) {
          const int r = i / PER_ROW, g = i % PER_ROW * STEP, h = head.quotient(col0 + g);
          if (row0 + r >= row_end || col0 + g < begin || col0 + g >= end) continue;
          const Token t = token(batch, row0 + r);
          i64 entry = t.entry, row = t.index;
          if (Config::PAGED && n > 0) {
            const int number = page.quotient(t.position);
            entry = table[t.entry * (i64)table_row + number];
            row = t.position - number * page.d;
          }
          TC* const to = (TC*)operand.base + entry * operand.batch + (h - operand.first) * operand.head + row * operand.row;
          f(r, g, to, col0 + g - h * head.d);
        }
      };
      if (Config::VECTOR_C != 16 || head.d % GROUP || order.rotary_dim % GROUP) {
        each(Number<1>{}, [&](int r, int g, TC* to, int c) { to[order.element(col0 + g, c)] = tile.at(r, g); });
        continue;
      }
      each(Number<GROUP>{}, [&](int r, int g, TC* to, int c) {
        const Chunk<TC> x = tile.chunk(r, g);
        if constexpr (Config::ROTARY == HALF_SPLIT) {
          const Chunk<TC> y = tile.chunk(r, g + V);
          const bool apart = order.rotated(col0 + g, c);
          Chunk<TC> first, second;
#pragma unroll
          for (int e = 0; e < V; e++) {
            const Chunk<TC>& from = 2 * e < V ? x : y;
            first.v[e] = apart ? from.v[2 * e % V] : x.v[e];
            second.v[e] = apart ? from.v[2 * e % V + 1] : y.v[e];
          }
          *(Chunk<TC>*)(to + (apart ? c / 2 : c)) = first;
          *(Chunk<TC>*)(to + (apart ? c / 2 + order.rotary_dim / 2 : c + V)) = second;
        } else {
          *(Chunk<TC>*)(to + c) = x;
        }
      });
    }
  }
};
