// The result of the projection that makes q, k and v: C's columns are heads, which lie in three operands, token by token.
//
// Columns are numbered head after head, those of q first, then k's, then v's. Half-split rotary embedding rotates element i
// with i + n/2 (n = rotary_dim): the rows of the weight are taken in groups of UNIT, UNIT of the lower half and UNIT of the
// upper in turns, so that the two are UNIT columns apart, which one thread has. The order is undone when results are stored.
// Interleaved pairs (2i with 2i + 1) are neighbours as they are.
// (RoFormer, Su et al. 2021, arXiv:2104.09864: x_i' = x_i·cos − x_j·sin, x_j' = x_j·cos + x_i·sin.)
//
// A warp's own stores go wherever rows lie: pages, entries that end within a tile, heads of any multiple of 8 elements. TMA's
// go through a map an operand (element, token, head, entry): heads of multiples of 64, 64 rows of a tile in one entry.
#pragma once
#include "gemm/head_places.h"
#include "sm90/gemm/result.h"

enum { HALF_SPLIT = 1, INTERLEAVED = 2 };
constexpr int UNIT = 32, GROUP = 2 * UNIT;  // columns of a tile: GROUP of them, one half beside the other
static_assert(!Config::ROTARY || (BN % GROUP == 0 && BN / B_PARTS % UNIT == 0), "a tile is of whole groups, a block's part of B of whole units");

// Which element of a head each column holds. Groups lie wholly within a head, and wholly within what is rotated or outside.
struct Order {
  FastDivmod head;
  int rotated_end, rotary_dim;  // columns from rotated_end on are v's

  KS_DEVICE int in_head(int column) const { return column - head.quotient(column) * head.d; }
  // Of the column that is number c of its head.
  KS_DEVICE bool rotated(int column, int c) const { return Config::ROTARY && column < rotated_end && c < rotary_dim; }
  KS_DEVICE int element(int column, int c) const {
    if (Config::ROTARY != HALF_SPLIT || !rotated(column, c)) return c;
    return c / GROUP * UNIT + c % UNIT + (c / UNIT & 1) * (rotary_dim / 2);
  }
};

// An argument of the kernel, passed whole.
struct HeadsResult : HeadPlaces<Order> {
  static constexpr bool ORDERED = Config::ROTARY == HALF_SPLIT;
  static constexpr int BOX_BYTES = ORDERED && Config::STORE == TMA ? 2 * UNIT : 128, UNIT_ROWS = UNIT;

  KS_DEVICE int weight_row(int column) const {
    if (!ORDERED) return column;
    const int c = order.in_head(column);
    return column - c + order.element(column, c);
  }

  // Of a panel's pairs: a thread has 8 in each of its rows. `o`: the first column, from the tile's on, of the GROUP (or of the 8
  // columns) that pair n is in; `x`, `y`: its accumulators, of a thread's first row; `index`: of its cosine, behind that of the
  // group's first element.
  struct Pair { int o, x, y, index; };
  static KS_DEVICE Pair pair(int first, int n, int column) {
    if (Config::ROTARY == INTERLEAVED) return {first + 8 * n, first / 2 + 4 * n, first / 2 + 4 * n + 1, column / 2};
    const int o = first + n / (UNIT / 4) * GROUP, j = n % (UNIT / 4) / 2, e = n & 1, x = o / 2 + 4 * j + e;
    return {o, x, x + UNIT / 2, 8 * j + column + e};
  }
  // Cosines and sines of some of a panel's pairs, as many as registers hold; what is not rotated has none. tables: where the
  // rows' begin.
  static constexpr int AT_ONCE = PING_PONG ? 2 : Config::BLOCKS == 1 ? 8 : SPLIT > 1 ? 1 : 2, STEPS = PANELS * 8 / AT_ONCE, AHEAD = MT == 1;
  struct Angles { float cosine[MT][2][AT_ONCE], sine[MT][2][AT_ONCE]; };
  KS_DEVICE bool rotates(const TileCoord& p, const Pair& x, int c, int column) const {
    return order.rotated(p.column + x.o, c + (Config::ROTARY == INTERLEAVED ? column : 0));
  }
  KS_DEVICE void load(Angles& to, const TileCoord& p, int step, int column, const i64 (&tables)[MT][2]) const {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const Pair x = pair(step * AT_ONCE / 8 * 64, step * AT_ONCE % 8 + n, column);
      const int c = order.in_head(p.column + x.o);
      if (rotates(p, x, c, column))
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const i64 at = tables[i][h] + c / 2 + x.index;
            to.cosine[i][h][n] = cosines[at], to.sine[i][h][n] = sines[at];
          }
    }
  }

  // Turns a thread's accumulators, which are of rows row + 64·i and 8 more, and of `column`s of neighbours every 8 (from its
  // place in the first 8 of the tile on). The next angles are asked for before these are used.
  template<class Place> KS_DEVICE void apply_rotary(float (&acc)[MT][BN / 2], const Place& p, int row, int column, int M) const {
    if (p.column >= order.rotated_end) return;
    i64 tables[MT][2];  // rows beyond the last have that one's
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        tables[i][h] = (i64)token(p.batch, min_of(row + 64 * i + 8 * h, M - 1)).position * rotary_row;
    Angles angles[1 + AHEAD];
    if (AHEAD) load(angles[0], p, 0, column, tables);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if (!AHEAD) load(angles[0], p, step, column, tables);
      else if (step + 1 < STEPS) load(angles[(step + 1) % 2], p, step + 1, column, tables);
      const Angles& now = angles[AHEAD ? step % 2 : 0];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const Pair at = pair(step * AT_ONCE / 8 * 64, step * AT_ONCE % 8 + n, column);
        if (!rotates(p, at, order.in_head(p.column + at.o), column)) continue;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float &x = acc[i][at.x + 2 * h], &y = acc[i][at.y + 2 * h];
            const float cosine = now.cosine[i][h][n], sine = now.sine[i][h][n], old = x;
            x = old * cosine - y * sine, y = y * cosine + old * sine;
          }
      }
    }
  }

  // The operand that a head belongs to.
  KS_DEVICE int operand(int head) const { return (head >= operands.of[1].first) + (head >= operands.of[2].first); }

  KS_DEVICE Matrix matrix(const Arguments&, const TileCoord& p) const { return {0, p.batch}; }
  KS_DEVICE void store_boxes(const Maps& maps, const Arguments& a, u32 from, Matrix c, int column, int, int row, u64) const {
    if (row >= a.M || column >= a.N) return;  // beyond M begins the next entry
    const Token t = token(c.x3, row);
    const int head = order.head.quotient(column), n = operand(head), first = column - head * order.head.d;
    const TensorMap& map = n == 0 ? maps.c : n == 1 ? maps.c1 : maps.c2;
#pragma unroll
    for (int b = 0; b < 64; b += BOX_BYTES / 2)
      tma_store(map, from + b * 128, order.element(column + b, first + b), t.index, head - operands.of[n].first, t.entry);
  }

  // Each lane knows a token, of row first + lane % 16, and where pages have it.
  struct Rows {
    int first, entry, index, page, page_row;
  };
  KS_DEVICE Rows rows(const Arguments& a, const TileCoord& p, int first) const {
    const Token t = token(p.batch, min_of(first + (lane() & 15), a.M - 1));
    if (!Config::PAGED) return {first, t.entry, t.index, 0, 0};
    const int number = page.quotient(t.position);
    return {first, t.entry, t.index, table[t.entry * (i64)table_row + number], t.position - number * page.d};
  }
  // Every lane must come.
  KS_DEVICE void store(const Arguments& a, const StoredRows&, const Rows& rows, int r, int column, const Chunk<T>& x) const {
    const int entry = shuffle(rows.entry, r), index = shuffle(rows.index, r);
    const int number = Config::PAGED ? shuffle(rows.page, r) : 0, in_page = Config::PAGED ? shuffle(rows.page_row, r) : 0;
    if (rows.first + r >= a.M || column >= a.N) return;
    const int head = order.head.quotient(column), n = operand(head), c = column - head * order.head.d;
    const auto& to = operands.of[n];
    const bool paged = Config::PAGED && n > 0;
    *(Chunk<T>*)((T*)to.base + (paged ? number : entry) * to.batch + (head - to.first) * to.head
                 + (i64)(paged ? in_page : index) * to.row + order.element(column, c)) = x;
  }
};
