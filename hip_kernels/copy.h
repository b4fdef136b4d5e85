// Copies from global to shared memory, through registers: `fetch` loads, `land` stores.
#pragma once

typedef unsigned Quad __attribute__((ext_vector_type(4)));  // 16 bytes
typedef unsigned Pair __attribute__((ext_vector_type(2)));  // 8 bytes

// What a view points to lies in global memory, which the compiler cannot always see.
template<class X> KS_DEVICE X load_global(const void* p) { return *(const KS_GLOBAL X*)p; }
#if KS_E4M3
template<> KS_DEVICE e4m3 load_global<e4m3>(const void* p) { return {*(const KS_GLOBAL unsigned char*)p}; }
#endif
// 16 bytes that begin at any element: one load, as the target lets global memory be read at any address (the compiler's
// unaligned-access-mode, which is on for amdhsa).
KS_DEVICE Quad load_chunk(const void* p) {
  typedef Quad Anywhere __attribute__((aligned(1)));
  return *(const KS_GLOBAL Anywhere*)p;
}
// The same by narrow loads, for what is rare.
template<class X, class Words> KS_DEVICE X load_words(const void* p) {
  X x;
#pragma unroll
  for (int i = 0; i < (int)sizeof(X) / 4; i++) x[i] = ((Words)p)[i];
  return x;
}
// x, whose loads are complete from here on.
template<class X> KS_DEVICE X arrived(X x) {
  asm volatile("" : "+v"(x));
  return x;
}

KS_DEVICE void copies_commit() {}
template<int PENDING> KS_DEVICE void copies_wait() {}

// f(0), f(1), … f(N − 1) with constants: what a pragma leaves to the optimizer's judgement, arrays in registers cannot.
template<int I> struct Index { KS_DEVICE constexpr operator int() const { return I; } };
template<int N, int I = 0, class F> KS_DEVICE void unrolled(F&& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    unrolled<N, I + 1>(f);
  }
}

// A place for 16 bytes of a tile that is stored as it lies in global memory.
template<class Tile> KS_DEVICE Quad* chunk_place(Tile t, int row, int column) { return (Quad*)&t.chunk(row, column); }
template<class T, int N, int K> KS_DEVICE Quad* chunk_place(MatrixTile<T, N, K, true> t, int row, int column) {
  return (Quad*)t.place(row, column);
}

// Which 16-byte chunks of a tile thread `me` copies, RUN neighbouring rows a round, and how they are stored.
template<class Tile, int THREADS> struct Dealing {
  static constexpr int V = 16 / (int)sizeof(typename Tile::T), PER_ROW = Tile::COLS / V, CHUNKS = Tile::ROWS * PER_ROW;
  static constexpr int RUN = 1, ROUNDS = (CHUNKS + THREADS - 1) / THREADS;
  unsigned me;
  KS_DEVICE unsigned index(int round) const { return me + round * THREADS; }
  KS_DEVICE bool takes(int round) const { return CHUNKS % THREADS == 0 || index(round) < CHUNKS; }
  KS_DEVICE int row(int round) const { return index(round) / PER_ROW; }
  KS_DEVICE int column(int round) const { return index(round) % PER_ROW * V; }
  KS_DEVICE void store(Tile t, int round, const Quad* x) const { *chunk_place(t, row(round), column(round)) = *x; }
};

// A tile whose rows are k is stored with k contiguous: a thread takes one chunk of RUN neighbouring rows and stores, for
// each of the chunk's outer indices, RUN values of k at once.
template<class T, int N, int K, int THREADS> struct Dealing<MatrixTile<T, N, K, false>, THREADS> {
  typedef MatrixTile<T, N, K, false> Tile;
  static constexpr int V = 16 / (int)sizeof(T), PER_ROW = N / V;
  static constexpr int RUN = K * PER_ROW >= 8 * THREADS && sizeof(T) < 4 ? 8 : K * PER_ROW >= 4 * THREADS || sizeof(T) == 1 ? 4 : 2;
  static constexpr int BUNDLES = K / RUN * PER_ROW, ROUNDS = (BUNDLES + THREADS - 1) / THREADS;
  // Lanes next to each other take chunks next to each other, 8 of them, then the next rows: so the stores of a wave
  // spread over all banks.
  static constexpr int NEAR = PER_ROW % 8 == 0 ? 8 : PER_ROW;
  unsigned me;
  KS_DEVICE unsigned index(int round) const { return me + round * THREADS; }
  KS_DEVICE bool takes(int round) const { return BUNDLES % THREADS == 0 || index(round) < BUNDLES; }
  KS_DEVICE int row(int round) const { return index(round) / NEAR % (K / RUN) * RUN; }
  KS_DEVICE int column(int round) const {
    return (index(round) % NEAR + index(round) / NEAR / (K / RUN) * NEAR) * V;
  }
  KS_DEVICE void store(Tile t, int round, const Quad* x) const {
    typedef unsigned Stored __attribute__((ext_vector_type(RUN * (int)sizeof(T) / 4)));
    const int k = row(round), n = column(round);
    const unsigned bytes = sizeof(T) == 1 ? opaque(0x0c0c0400) : 0;  // four constants would take scalar registers
#pragma unroll
    for (int e = 0; e < V; e++) {
      Stored y;
      if constexpr (sizeof(T) == 1) {
        auto two = [&](int i) {  // the bytes e of rows i and i + 1
          return __builtin_amdgcn_perm(x[i + 1][e / 4], x[i][e / 4], bytes + e % 4 * 0x101);
        };
#pragma unroll
        for (int i = 0; i < RUN / 4; i++) y[i] = two(4 * i) | two(4 * i + 2) << 16;
      } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < RUN; i++) y[i] = x[i][e];
      } else {
#pragma unroll
        for (int i = 0; i < RUN / 2; i++)  // the halves e of rows 2i and 2i + 1
          y[i] = __builtin_amdgcn_perm(x[2 * i + 1][e / 2], x[2 * i][e / 2], e % 2 ? 0x07060302 : 0x05040100);
      }
      *(Stored*)t.place(n + e, k) = y;
    }
  }
};

// Nothing is moved across this: addresses would else all be made first.
KS_DEVICE void one_by_one() { __builtin_amdgcn_sched_barrier(0); }

// x with its elements of SIZE bytes moved down by n places and zeros behind them: all of x for n ≤ 0, none of it where n
// reaches their number.
template<int SIZE> KS_DEVICE Quad moved_down(Quad x, int n) {
  const int bytes = max_of(n, 0) * SIZE;
  if (SIZE < 4)
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __builtin_amdgcn_alignbit(i < 3 ? x[i + 1] : 0, x[i], bytes % 4 * 8);
#pragma unroll
  for (int words = 1; words < 4; words *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = bytes & 4 * words ? (i + words < 4 ? x[i + words] : 0) : x[i];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = bytes < 16 ? x[i] : 0;
  return x;
}

// How a tile's elements come from memory: S there, a chunk's worth of them, and the tile as it is stored.
template<class Tile> struct Source {
  typedef typename Tile::T S;
  typedef Quad Loaded;
  typedef Tile Kept;
  static KS_DEVICE Quad load(const void* p) { return load_chunk(p); }
  static KS_DEVICE Quad words(const void* p) {
    typedef unsigned Word __attribute__((aligned(1)));
    return load_words<Quad, const volatile KS_GLOBAL Word*>(p);
  }
  static KS_DEVICE Loaded moved(Loaded x, int n) { return moved_down<sizeof(S)>(x, n); }
  static KS_DEVICE Quad kept(Loaded x) { return x; }
};
#if KS_E4M3
// A pair of T of numbers that both have, whichever way they are rounded.
template<class T> KS_DEVICE unsigned short_pair(float lo, float hi) {
  return __builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(lo, hi));
}
template<> KS_DEVICE unsigned short_pair<bf16>(float lo, float hi) {
  return __builtin_amdgcn_perm(__builtin_bit_cast(unsigned, hi), __builtin_bit_cast(unsigned, lo), 0x07060302);
}
// Half the bytes, which become T, exactly, as they are stored.
template<class T, int N, int K, bool K_LAST> struct Source<WidenedTile<T, N, K, K_LAST>> {
  typedef e4m3 S;
  typedef Pair Loaded;
  typedef MatrixTile<T, N, K, K_LAST> Kept;
  static KS_DEVICE Pair load(const void* p) {
    typedef Pair Anywhere __attribute__((aligned(1)));
    return *(const KS_GLOBAL Anywhere*)p;
  }
  static KS_DEVICE Pair words(const void* p) {
    typedef unsigned Word __attribute__((aligned(1)));
    return load_words<Pair, const volatile KS_GLOBAL Word*>(p);
  }
  static KS_DEVICE Pair moved(Pair x, int n) { return moved_down<1>(Quad{x.x, x.y, 0, 0}, n).lo; }
  static KS_DEVICE Quad kept(Pair x) {
    Quad y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const auto two = i % 2 ? __builtin_amdgcn_cvt_pk_f32_fp8(x[i / 2], true) : __builtin_amdgcn_cvt_pk_f32_fp8(x[i / 2], false);
      y[i] = short_pair<T>(two[0], two[1]);
    }
    return y;
  }
};
#endif

// Whether rows of a view lie one common distance apart: then one base and 32-bit offsets address a tile's.
template<class View> struct Strides { static constexpr bool COMMON = false; };
template<class T> struct Strides<StridedView<T>> { static constexpr bool COMMON = true; };

template<class Tile, int THREADS, int VECTOR, bool EXACT, bool BRIEF = false> struct Copy {
  typedef Source<Tile> From;
  typedef typename From::S S;
  typedef typename From::Loaded Loaded;
  typedef Dealing<typename From::Kept, THREADS> Mine;
  static constexpr int ROUNDS = Mine::ROUNDS, RUN = Mine::RUN, V = Mine::V, SIZE = (int)sizeof(S);
  Loaded x[ROUNDS][RUN];
  int rows_left, cols_left;  // from the tile's first row and column to the matrix's ends

  // A warp's number among several that copy each its own tiles does not count.
  static KS_DEVICE int self() { return THREADS == WARP ? lane() : thread_index(); }
  // What it is dealt, known once; and made anew, where it would take registers for what happens rarely.
  static KS_DEVICE Mine dealt() { return {(unsigned)self()}; }
  static KS_DEVICE Mine dealt_anew() { return {(unsigned)opaque(self())}; }
  KS_DEVICE bool inside() const { return rows_left >= Tile::ROWS && (EXACT || cols_left >= Tile::COLS); }

  // load(i, j, row, column) of every chunk: row and column in the tile.
  template<class Load> KS_DEVICE void each_chunk(const Mine mine, Load load) {
    unrolled<ROUNDS>([&](auto i) {
      if (!mine.takes(i)) return;
      unrolled<RUN>([&](auto j) { x[i][j] = load(mine.row(i) + j, mine.column(i)); });
      one_by_one();
    });
  }

  // What is beyond an end is loaded from before it: instead of a row the last one, instead of a chunk that its row's end
  // cuts off the row's last 16 bytes. It is put right when it lands. So every tile takes the same way, without
  // branches: loads of two ways into the same registers wait for each other.
  template<class View> KS_DEVICE void fetch(Tile, View v, int row0, int row_end, int col0, int col_end) {
    rows_left = opaque_uniform(row_end - row0), cols_left = opaque_uniform(col_end - col0);
    if constexpr (Strides<View>::COMMON) {
      // Of a tile with a common stride the offsets stay what they are from tile to tile: only the base moves.
      constexpr int FAR = 0x7fffffff / (Tile::ROWS * SIZE);
      // Every one of these is at least 0: a row has a chunk, the tile begins inside, and the stride is small.
      if ((col_end - V | rows_left - 1 | cols_left - 1 | v.stride | FAR - v.stride) >= 0) {
        // A chunk that is cut off begins before the tile: offsets are from a chunk before it.
        constexpr int BEFORE = EXACT ? 0 : V;
        const KS_GLOBAL char* const base = (const KS_GLOBAL char*)(v.row(row0) + col0 - BEFORE);
        const unsigned stride = (unsigned)v.stride * SIZE, last = (unsigned)(rows_left - 1) * stride;
        each_chunk(dealt(), [&](int row, int column) {
          const unsigned from = (EXACT ? column : min_of(column, cols_left - V) + BEFORE) * SIZE;
          const unsigned wanted = row * stride + from, most = last + from;
          return From::load((const void*)(base + (wanted < most ? wanted : most)));
        });
        return;
      }
    }
    auto row_of = [&](int row) { return v.row(row0 + min_of(row, rows_left - 1)) + col0; };
    if (col_end >= V)
      each_chunk(dealt_anew(), [&](int row, int column) {
        const S* const from = row_of(row) + (EXACT ? column : min_of(column, cols_left - V));
        return Strides<View>::COMMON ? arrived(From::words(from)) : From::load(from);
      });
    else  // a whole row is less than a chunk: its elements become the last ones of each
      each_chunk(dealt_anew(), [&](int row, int) {
        struct alignas(sizeof(Loaded)) { S v[V]; } y;
        unrolled<V>([&](auto e) { y.v[e] = load_global<S>(row_of(row) + max_of(cols_left - V + e, 0)); });
        return arrived(__builtin_bit_cast(Loaded, y));
      });
  }

  template<class View> KS_DEVICE void load(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    fetch(t, v, row0, row_end, col0, col_end);
    land(t);
  }
  KS_DEVICE void land(Tile t) {
    if (!inside()) {
      const Mine mine = dealt_anew();
      unrolled<ROUNDS>([&](auto i) {
        unrolled<RUN>([&](auto j) {
          const int beyond = EXACT ? 0 : mine.column(i) + V - cols_left;
          x[i][j] = From::moved(x[i][j], mine.row(i) + j < rows_left ? beyond : V);
        });
        one_by_one();
      });
    }
    // Of 32 lanes each copies twice as much, and its places would take registers all the time.
    const Mine mine = BRIEF && WARP == 32 ? dealt_anew() : dealt();
    unrolled<ROUNDS>([&](auto i) {
      if (!mine.takes(i)) return;
      Quad y[RUN];
      unrolled<RUN>([&](auto j) { y[j] = From::kept(x[i][j]); });
      mine.store(t, i, y);
    });
  }
};
