// The engine for float32 and float64: products of two tiles in shared memory by plain multiply-adds.
// A warp's accumulator R×C is dealt to lanes as 8 rows × (WARP/8) columns: lane (p, q) holds rows (8·g + p)·VR + e and
// columns (g·Q + q)·V + e. An operand is a place in shared memory, not registers.
//
// Where a platform defines KS_PAIRED_LANES, lanes next to each other share columns and lanes 2 apart share rows, a lane has up
// to 16 bytes of neighbouring rows, and addresses of a step of k are computed once: see PairedLayout and Reader.
#pragma once

#ifdef KS_PAIRED_LANES
static constexpr bool PAIRED_LANES = true;
#else
static constexpr bool PAIRED_LANES = false;
#endif

// Chunks permuted for paired lanes. A load of 16 bytes a lane takes two transactions where lanes i and i ^ 1, or i and i ^ 2, ask
// for the same address (else four): of half a warp each, with four addresses that are 1, 2 or 4 rows apart. No two of those
// meet a bank twice.
template<class T, int COLS> struct PairedLayout {
  static constexpr int V = 16 / (int)sizeof(T), P = min_of(Swizzle<T, COLS>::P, 4), PERIOD = 16;
  static KS_DEVICE constexpr int mask(int row) { return (row ^ row >> 2) & (P - 1); }
  static KS_DEVICE int offset(int row, int col) { return row * COLS + ((col / V) ^ mask(row)) * V + col % V; }
};

template<class T_> struct SimtEngine {
  typedef T_ T;
  typedef T_ Sum;
  static constexpr bool MATRIX = false;
  static constexpr int Q = WARP / 8;
  static constexpr int V = 16 / (int)sizeof(T) < 16 / Q ? 16 / (int)sizeof(T) : 16 / Q;
  static constexpr int KV = 16 / (int)sizeof(T);
  static constexpr int K_STEP = 16;
  static constexpr bool ONE_LAYOUT = true;
  static constexpr int NEAR = PAIRED_LANES ? 2 : 1;  // lanes next to each other that share columns
  // Neighbouring rows of a lane.
  template<int R> static constexpr int VR = !PAIRED_LANES ? 1 : R / 8 % 4 == 0 ? min_of(KV, 4) : R / 8 % 2 == 0 ? 2 : 1;

  template<int ROWS, int COLS>
  using Lies = PlainTile<T, ROWS, COLS, typename conditional<PAIRED_LANES, PairedLayout<T, COLS>, Swizzle<T, COLS>>::type>;
  template<int N, int K, bool K_LAST_> struct Tile : Lies<K_LAST_ ? N : K, K_LAST_ ? K : N> {
    static constexpr bool K_LAST = K_LAST_;
    KS_DEVICE explicit Tile(char* m) : Lies<K_LAST_ ? N : K, K_LAST_ ? K : N>(m) {}
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
  template<int C> struct Column { Sum x[C / Q]; };
  template<int R, int K, class From> struct Operand { From tile; int row0, k0; };

  static KS_DEVICE int p() { return lane() / (Q * NEAR) * NEAR + lane() % NEAR; }
  static KS_DEVICE int q() { return lane() / NEAR % Q; }
  template<int R> static KS_DEVICE int row(int r) { return (r / VR<R> * 8 + p()) * VR<R> + r % VR<R>; }
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

  // What a lane reads of a factor: outer indices n0 + (g·LANES + me)·N + e, of k from k0 on. n0 and k0 are multiples of 16 (n0 of
  // 8 where N is 1). Which of four neighbouring chunks is meant is all that depends on the lane beside the place of the first; the
  // rest is known when compiling.
  template<class From, int N, int LANES> struct Reader {
    typedef typename From::Layout Layout;
    struct alignas(N * sizeof(T)) Part { T v[N]; };
    const char* base;
    int chunks[4];  // bytes from there to a chunk
    KS_DEVICE Reader(From t, int n0, int me, int k0) : base((const char*)t.base) {
      const int first = n0 + me * N;
#pragma unroll
      for (int v = 0; v < 4; v++)
        chunks[v] = (From::K_LAST ? first * From::COLS + k0 + (v ^ Layout::mask(first)) * KV
                                  : k0 * From::COLS + (first / KV ^ v) * KV + first % KV) * (int)sizeof(T);
    }
    // From step of KV of k to the next of four: the numbers of chunks change by an exclusive or. Rows are whole fours of them.
    KS_DEVICE void after(int step) {
#pragma unroll
      for (int v = 0; v < 4; v++)
        chunks[v] = (chunks[v] ^ (step ^ (step + 1)) * 16) + (From::K_LAST ? 0 : KV * From::COLS * (int)sizeof(T));
    }
    // The KV values of the lane's index i at k, k + 1, …
    KS_DEVICE const Chunk<T>& along_k(int i, int k) const {
      const int n = i / N * LANES * N + i % N, chunk = k / KV;
      const int rest = (n * From::COLS + (chunk & ~3) * KV) * (int)sizeof(T);
      return *(const Chunk<T>*)(base + chunks[(chunk ^ Layout::mask(n)) & 3] + rest);
    }
    // The values of its N indices from i on at k.
    KS_DEVICE const Part& along_n(int i, int k) const {
      return *(const Part*)(base + chunks[Layout::mask(k)] + (k * From::COLS + i / N * LANES * N) * (int)sizeof(T));
    }
  };

  // KV of k by KV of k: all that a lane needs of the left factor, then of the right one as it comes.
  template<int R, int C, int K, class From, class B>
  static KS_DEVICE void mma_paired(Acc<R, C>& acc, const Operand<R, K, From>& a, B b, int n0, int k0) {
    typedef Reader<From, VR<R>, 8> Left;
    Left lefts(a.tile, a.row0, p(), a.k0);
    Reader<B, V, Q> rights(b, n0, q(), k0);
    T left[R / 8][KV];
    auto left_along_k = [&](int k) {
#pragma unroll
      for (int r = 0; r < R / 8; r++) {
        const Chunk<T> x = lefts.along_k(r, k);
#pragma unroll
        for (int e = 0; e < KV; e++) left[r][e] = x.v[e];
      }
    };
    auto left_along_n = [&](int k, int e) {
#pragma unroll
      for (int r = 0; r < R / 8; r += VR<R>) {
        const typename Left::Part x = lefts.along_n(r, k + e);
#pragma unroll
        for (int f = 0; f < VR<R>; f++) left[r + f][e] = x.v[f];
      }
    };
    auto multiply_along_k = [&](int k) {
#pragma unroll
      for (int c = 0; c < C / Q; c++) {
        const Chunk<T> right = rights.along_k(c, k);
#pragma unroll
        for (int r = 0; r < R / 8; r++)
#pragma unroll
          for (int e = 0; e < KV; e++) acc.x[r][c] += left[r][e] * right.v[e];
      }
    };
    if constexpr (B::K_LAST && K == 4 * KV && KV == 4) {
#pragma unroll 1  // else more of what comes later is loaded ahead than there are registers
      for (int step = 0; step < 4; step++) {
        if constexpr (From::K_LAST) left_along_k(0);
        else
#pragma unroll
          for (int e = 0; e < KV; e++) left_along_n(0, e);
        multiply_along_k(0);
        lefts.after(step), rights.after(step);
      }
    } else {
#pragma unroll (K > 8 * KV ? 1 : 2)
      for (int four = 0; four < K; four += 4 * KV)
#pragma unroll
      for (int k = four; k < min_of(four + 4 * KV, K); k += KV) {
        if constexpr (From::K_LAST) left_along_k(k);
        if constexpr (B::K_LAST) {
          if constexpr (!From::K_LAST)
#pragma unroll
            for (int e = 0; e < KV; e++) left_along_n(k, e);
          multiply_along_k(k);
        } else {
#pragma unroll
          for (int e = 0; e < KV; e++) {
            if constexpr (!From::K_LAST) left_along_n(k, e);
#pragma unroll
            for (int g = 0; g < C / Q; g += V) {
              const typename Reader<B, V, Q>::Part right = rights.along_n(g, k + e);
#pragma unroll
              for (int f = 0; f < V; f++)
#pragma unroll
                for (int r = 0; r < R / 8; r++) acc.x[r][g + f] += left[r][e] * right.v[f];
            }
          }
        }
      }
    }
  }

  template<int R, int C, int K, class From, class B>
  static KS_DEVICE void mma(Acc<R, C>& acc, const Operand<R, K, From>& a, B b, int n0, int k0) {
    static_assert(K % KV == 0 && R % 8 == 0 && C % (Q * V) == 0, "shape of a SIMT product");
    if constexpr (PAIRED_LANES && (VR<R> > 1 || R == 8)) return mma_paired(acc, a, b, n0, k0);
#pragma unroll 1
    for (int k = 0; k < K; k += KV) {
      Chunk<T> left[R / 8];
#pragma unroll
      for (int r = 0; r < R / 8; r++) left[r] = a.tile.along_k(a.row0 + row<R>(r), a.k0 + k);
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
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(row<R>(r), column(c), a.x[r][c]);
  }

  template<int R, int C, class F> static KS_DEVICE void map2(Acc<R, C>& a, const Acc<R, C>& b, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(row<R>(r), column(c), a.x[r][c], b.x[r][c]);
  }

  template<int R, int C, class F> static KS_DEVICE void map_pairs(Acc<R, C>& a, F f) {
    static_assert(V % 2 == 0, "neighbours in one lane");
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c += 2) f(row<R>(r), column(c), a.x[r][c], a.x[r][c + 1]);
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
    for (int r = 0; r < R / 8; r++) a.x[r] = f(row<R>(r), a.x[r]);
  }
  template<int R, int C, class F> static KS_DEVICE void row_apply(Acc<R, C>& a, const Row<R>& v, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) a.x[r][c] = f(a.x[r][c], v.x[r]);
  }
  template<int R, int C> static KS_DEVICE void row_scale(Acc<R, C>& a, const Row<R>& v) {
    row_apply(a, v, [](Sum x, Sum y) { return x * y; });
  }
  template<int R, int C> static KS_DEVICE void row_max(Row<R>& out, const Acc<R, C>& a) {
#pragma unroll
    for (int r = 0; r < R / 8; r++) {
      Sum v = a.x[r][0];
#pragma unroll
      for (int c = 1; c < C / Q; c++) v = maximum(v, a.x[r][c]);
#pragma unroll
      for (int m = NEAR; m < Q * NEAR; m *= 2) v = maximum(v, shuffle_xor(v, m));
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
      for (int m = NEAR; m < Q * NEAR; m *= 2) a.x[r] += shuffle_xor(a.x[r], m);
  }
  template<int R, class F> static KS_DEVICE void each_row(const Row<R>& a, F f) {
    if (q() == 0)
#pragma unroll
      for (int r = 0; r < R / 8; r++) f(row<R>(r), a.x[r]);
  }

  template<int R, int C, class F> static KS_DEVICE void row_fold(Row<R>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c++) out.x[r] = f(out.x[r], row<R>(r), column(c), a.x[r][c]);
  }
  template<int R, class F> static KS_DEVICE void row_join(Row<R>& a, F f) {
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int m = NEAR; m < Q * NEAR; m *= 2) a.x[r] = f(a.x[r], shuffle_xor(a.x[r], m));
  }
  template<int R, int C, class F> static KS_DEVICE void column_fold(Column<C>& out, const Acc<R, C>& a, F f) {
#pragma unroll
    for (int c = 0; c < C / Q; c++) {
      out.x[c] = 0;
#pragma unroll
      for (int r = 0; r < R / 8; r++) out.x[c] = f(out.x[c], row<R>(r), column(c), a.x[r][c]);
    }
  }
  template<int C, class F> static KS_DEVICE void column_join(Column<C>& a, F f) {
#pragma unroll
    for (int c = 0; c < C / Q; c++) {
#pragma unroll
      for (int m = 1; m < NEAR; m *= 2) a.x[c] = f(a.x[c], shuffle_xor(a.x[c], m));
#pragma unroll
      for (int m = Q * NEAR; m < WARP; m *= 2) a.x[c] = f(a.x[c], shuffle_xor(a.x[c], m));
    }
  }
  template<int C, class F> static KS_DEVICE void each_column(const Column<C>& a, F f) {
    if (p() == 0)
#pragma unroll
      for (int c = 0; c < C / Q; c++) f(column(c), a.x[c]);
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
    constexpr int PER = PAIRED_LANES && V == KV && sizeof(To) == sizeof(T) ? V : 1;  // by elements, eight lanes would meet in a bank
#pragma unroll
    for (int r = 0; r < R / 8; r++)
#pragma unroll
      for (int c = 0; c < C / Q; c += PER) {
        if constexpr (PER > 1) {
          Chunk<To> x;
#pragma unroll
          for (int e = 0; e < PER; e++) x.v[e] = convert<To>(a.x[r][c + e]);
          t.chunk(row0 + row<R>(r), column0 + column(c)) = x;
        } else t.at(row0 + row<R>(r), column0 + column(c)) = convert<To>(a.x[r][c]);
      }
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
