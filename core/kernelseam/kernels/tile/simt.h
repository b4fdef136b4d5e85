// The engine for float32 and float64: products of two tiles in shared memory by plain multiply-adds.
// A warp's accumulator R×C is dealt to lanes as 8 rows × (WARP/8) columns: lane (p, q) holds rows p + 8·ri and
// columns (g·Q + q)·V + e. An operand is a place in shared memory, not registers.
#pragma once

template<class T_> struct SimtEngine {
  typedef T_ T;
  typedef T_ Sum;
  static constexpr bool MATRIX = false;
  static constexpr int Q = WARP / 8;
  static constexpr int V = 16 / (int)sizeof(T) < 16 / Q ? 16 / (int)sizeof(T) : 16 / Q;
  static constexpr int KV = 16 / (int)sizeof(T);
  static constexpr int K_STEP = 16;
  static constexpr bool ONE_LAYOUT = true;

  template<int N, int K, bool K_LAST_> struct Tile : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : PlainTile<T, K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
    KS_DEVICE T element(int n, int k) const { return K_LAST ? this->at(n, k) : this->at(k, n); }
    // The KV values of outer index n at k, k+1, …
    KS_DEVICE Chunk<T> along_k(int n, int k) const {
      if constexpr (K_LAST) {
        return this->chunk(n, k);
      } else {
        Chunk<T> x;
#pragma unroll
        for (int e = 0; e < KV; e++) x.v[e] = this->at(k + e, n);
        return x;
      }
    }
  };

  template<int R, int C> struct Acc { Sum x[R / 8][C / Q]; };
  template<int R> struct Row { Sum x[R / 8]; };
  template<int R, int K, class From> struct Operand { From tile; int row0, k0; };

  static KS_DEVICE int p() { return lane() / Q; }
  static KS_DEVICE int q() { return lane() % Q; }
  static KS_DEVICE int column(int c) { return (c / V * Q + q()) * V + c % V; }

  template<int R, int K, class From> static KS_DEVICE Operand<R, K, From> operand(From t, int row0, int k0) {
    return {t, row0, k0};
  }

  template<int R, int C> static KS_DEVICE void zero(Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = 0;
  }

  template<int R, int C, int K, class From, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K, From>& a, B b, int n0, int k0) {
    static_assert(K % KV == 0 && R % 8 == 0 && C % (Q * V) == 0, "shape of a SIMT product");
#pragma unroll 1
    for (int k = 0; k < K; k += KV) {
      Chunk<T> left[R / 8];
#pragma unroll
      for (int r = 0; r < R / 8; r++) left[r] = a.tile.along_k(a.row0 + p() + 8 * r, a.k0 + k);
      if constexpr (B::K_LAST) {
#pragma unroll
        for (int c = 0; c < C / Q; c++) {
          const Chunk<T> right = b.chunk(n0 + column(c), k0 + k);
#pragma unroll
          for (int r = 0; r < R / 8; r++)
#pragma unroll
            for (int e = 0; e < KV; e++) acc.x[r][c] += left[r].v[e] * right.v[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < KV; e++)
#pragma unroll
          for (int g = 0; g < C / Q; g += V) {
            struct alignas(V * sizeof(T)) Part { T v[V]; };
            const Part right = *(const Part*)&b.at(k0 + k + e, n0 + column(g));
#pragma unroll
            for (int r = 0; r < R / 8; r++)
#pragma unroll
              for (int f = 0; f < V; f++) acc.x[r][g + f] += left[r].v[e] * right.v[f];
          }
      }
    }
  }

  template<int R, int C, class F> static KS_DEVICE void map(Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(p() + 8 * r, column(c), a.x[r][c]);
  }

  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(p() + 8 * r, column(c), a.x[r][c], b.x[r][c]);
  }

  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
    static_assert(V % 2 == 0, "neighbours in one lane");
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c += 2) f(p() + 8 * r, column(c), a.x[r][c], a.x[r][c + 1]);
  }

  template<int R> static KS_DEVICE void fill(Row<R>& a, Sum v) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) a.x[r] = v;
  }
  template<int R, class F> static KS_DEVICE void zip(Row<R>& out, const Row<R>& a, const Row<R>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) out.x[r] = f(a.x[r], b.x[r]);
  }
  template<int R, class F> static KS_DEVICE void row_map(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) a.x[r] = f(p() + 8 * r, a.x[r]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(a.x[r][c], v.x[r]);
  }
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) {
      Sum v = a.x[r][0];
#pragma unroll
      for (int c = 1; c < C / Q; c++) v = maximum(v, a.x[r][c]);
#pragma unroll
      for (int m = 1; m < Q; m *= 2) v = maximum(v, shuffle_xor(v, m));
      out.x[r] = v;
    }
  }
  template<int R, int C> static KS_DEVICE void row_add_partial(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) out.x[r] += a.x[r][c];
  }
  template<int R> static KS_DEVICE void row_finish_sum(Row<R>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int m = 1; m < Q; m *= 2) a.x[r] += shuffle_xor(a.x[r], m);
  }
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    if (q() == 0)
#pragma unroll
      for (int r = 0; r < R / 8; r++) f(p() + 8 * r, a.x[r]);
  }

  template<int R, int C> static constexpr int operand_bytes() { return R * C * (int)sizeof(T); }
  template<int R, int C>
  static KS_DEVICE Operand<R, C, Tile<R, C, true>> to_operand(const Acc<R, C>& a, char* scratch) {
    Tile<R, C, true> t(scratch);
    warp_barrier();  // the warp has read what lay here
    to_shared(t, a);
    warp_barrier();
    return {t, 0, 0};
  }

  template<class Out, int R, int C>
  static KS_DEVICE void to_shared(Out t, const Acc<R, C>& a, int row0 = 0, int column0 = 0) {
    typedef typename Out::T To;
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) t.at(row0 + p() + 8 * r, column0 + column(c)) = convert<To>(a.x[r][c]);
  }

  template<int R, int C> static KS_DEVICE void atomic_add(Sum* to, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) lanes_add(to + r * 8 * C, a.x[r]);
  }
  template<int R, int C> static KS_DEVICE void load(Acc<R, C>& a, const Sum* from) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) lanes_load(a.x[r], from + r * 8 * C);
  }
};
