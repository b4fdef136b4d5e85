// Batched GEMV: up to VECTORS vectors x times a matrix W, for every matrix of a strided batch or of a list of addresses.
//   y[f][n] = alpha · Σ_k x[f][k] · W[n][k] + beta · y[f][n] + bias + residual[f][n]
// The host takes a GEMM of few rows so, with W = op(B)ᵀ, and one of few columns, with W = op(A) and y = Cᵀ.
//
// Algorithm: memory bounds it, so W goes from global memory to registers in pieces of 16 bytes, ROWS of them in flight in every
// lane, and is used once; x comes from cache. All sums are Sum's: float32, or float64 of float64.
//   Where k is contiguous in W (K_LAST), LANES lanes share ROWS rows n of W: each takes every LANES-th piece of them, and the
//   lanes' sums are added by shuffles, half of them in each lane of a pair. A block has THREADS/LANES · ROWS rows.
//   Where n is contiguous, LANES lanes share a row k of W, a piece of its n each: a block has LANES pieces of n, and its groups of
//   LANES lanes take ROWS rows k in turn. Their sums are added by shuffles within a warp, then in shared memory.
//
// Shared memory: n contiguous: WARPS · VECTORS · LANES pieces of sums. Registers: VECTORS · ROWS sums, or VECTORS pieces of sums;
// ROWS pieces of W.
#include "generated/config.h"
#include "tile/tile.h"

typedef Config::T T;
typedef Config::TY TY;
typedef decltype(to_sum(T())) Sum;
typedef optional<Config::BIAS> Bias;
typedef optional<Config::RESIDUAL> Residual;

constexpr int VECTORS = Config::VECTORS, LANES = Config::LANES, ROWS = Config::ROWS, THREADS = Config::THREADS, WARPS = THREADS / WARP;
constexpr int PIECE = Config::VECTOR / (int)sizeof(T), X_PIECE = Config::X_VECTOR == 0 ? 1 : Config::X_VECTOR / (int)sizeof(T);
constexpr int GROUPS = THREADS / LANES;
constexpr int COLUMNS = Config::K_LAST ? GROUPS * ROWS : LANES * PIECE;  // n of a block
static_assert(WARP % LANES == 0, "lanes of one warp share a row");
static_assert(Config::K_LAST || WARPS * VECTORS * COLUMNS * (int)sizeof(Sum) <= Config::SHARED_BYTES, "the sums fit");

// PIECE neighbouring elements, as they are loaded: at once where N is more than 1.
template<int N> struct Piece {
  typedef typename conditional<(N > 1), Chunk<T>, T>::type Loaded;
  Loaded x;
  KS_DEVICE void load(const T* from) { x = *(const Loaded*)from; }
  KS_DEVICE Sum at(int e) const {
    if constexpr (N > 1) return to_sum(x.v[e]);
    else return to_sum(x);
  }
  // Of elements at or beyond `valid`, none is read, and all are zero.
  KS_DEVICE void load(const T* from, int valid) {
    if constexpr (N > 1) {
#pragma unroll
      for (int e = 0; e < N; e++) x.v[e] = e < valid ? from[e] : zero_of<T>();
    } else {
      x = valid > 0 ? *from : zero_of<T>();
    }
  }
};

// Operands of a matrix: the first element, and the strides along f and n.
template<class X> struct Plane {
  X* base;
  i64 along_f, along_n;
  KS_DEVICE X& at(int f, int n) const { return base[f * along_f + n * along_n]; }
};

// Where K or alpha is 0 the host passes both as 0: x and W are then not read.
// Strides in elements; w_row: between rows of W as they lie in memory; x_k: between the elements of a vector.
KS_KERNEL(THREADS, 1)
gemv(const void* x, const void* w, void* y, const void* bias, const void* residual, i64 x_batch, i64 x_head, i64 w_batch, i64 w_head,
     i64 y_batch, i64 y_head, i64 bias_batch, i64 bias_head, i64 residual_batch, i64 residual_head, int x_f, int x_k, int w_row,
     int y_f, int y_n, int bias_f, int bias_n, int residual_f, int residual_n, int vectors, int N, int K, int num_heads,
     int x_head_group, int w_head_group, int slabs, Sum alpha, Sum beta) {
  const int matrix = block_index() / slabs, slab = block_index() - matrix * slabs;
  const int batch = matrix / num_heads, head = matrix - batch * num_heads;
  auto matrix_at = [&](auto base, int of_head, i64 by_batch, i64 by_head) {
    if (Config::POINTERS) return listed(base, (i64)matrix);
    return base + batch * by_batch + of_head * by_head;
  };
  const Plane<TY> to{matrix_at((TY*)y, head, y_batch, y_head), y_f, y_n};
  auto finish = [&](int f, int n, Sum sum) {
    if (f >= vectors || n >= N) return;
    sum *= alpha;
    if (beta != Sum(0)) sum += beta * (Sum)to_sum(to.at(f, n));
    if (Bias::THERE) {
      typedef const Bias::type Value;
      sum += (Sum)to_sum(Plane<Value>{matrix_at((Value*)bias, head, bias_batch, bias_head), bias_f, bias_n}.at(f, n));
    }
    if (Residual::THERE) {
      typedef const Residual::type Value;
      const Plane<Value> from{matrix_at((Value*)residual, head, residual_batch, residual_head), residual_f, residual_n};
      sum += (Sum)to_sum(from.at(f, n));
    }
    to.at(f, n) = convert<TY>(sum);
  };

  const int me = thread_index() % LANES, group = thread_index() / LANES;
  // Where nothing is multiplied, there may be neither lists nor matrices to take addresses from.
  auto where_multiplied = [&](auto multiply) {
    if (K == 0) return;
    const T* const first = matrix_at((const T*)x, head / x_head_group, x_batch, x_head);
    const T* vector[VECTORS];
#pragma unroll
    for (int f = 0; f < VECTORS; f++) vector[f] = first + (i64)min_of(f, vectors - 1) * x_f;
    multiply(vector, matrix_at((const T*)w, head / w_head_group, w_batch, w_head));
  };

  if constexpr (Config::K_LAST) {
    const int n0 = (slab * GROUPS + group) * ROWS;
    constexpr int SUMS = VECTORS * ROWS;
    Sum sum[SUMS] = {};
    where_multiplied([&](const T* const (&vector)[VECTORS], const T* rows) {
      const T* row[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) row[r] = rows + (i64)min_of(n0 + r, N - 1) * w_row;
      Piece<PIECE> own[ROWS], next[ROWS];
      auto add = [&](int k, int valid) {
#pragma unroll
        for (int f = 0; f < VECTORS; f++) {
          Sum factor[PIECE];
          if (X_PIECE == PIECE && valid == PIECE) {
            Piece<PIECE> x;
            x.load(vector[f] + k);
#pragma unroll
            for (int e = 0; e < PIECE; e++) factor[e] = x.at(e);
          } else {
#pragma unroll
            for (int e = 0; e < PIECE; e++) factor[e] = e < valid ? to_sum(vector[f][(i64)(k + e) * x_k]) : Sum(0);
          }
#pragma unroll
          for (int e = 0; e < PIECE; e++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[f * ROWS + r] += factor[e] * own[r].at(e);
        }
      };
      const int whole = K / PIECE * PIECE;
      int k = me * PIECE;
      if (Config::AHEAD && k < whole)
#pragma unroll
        for (int r = 0; r < ROWS; r++) own[r].load(row[r] + k);
#pragma unroll 1
      for (; k < whole; k += LANES * PIECE) {
        const int from = !Config::AHEAD || k + LANES * PIECE >= whole ? k : k + LANES * PIECE;  // the last piece twice: no branch
#pragma unroll
        for (int r = 0; r < ROWS; r++) (Config::AHEAD ? next : own)[r].load(row[r] + from);
        add(k, PIECE);
        if (Config::AHEAD)
#pragma unroll
          for (int r = 0; r < ROWS; r++) own[r] = next[r];
      }
      if (k == whole && whole < K) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) own[r].load(row[r] + k, K - whole);
        add(k, K - whole);
      }
    });
    // Lanes of a pair add up half of the sums each, then half of those with the lane of another pair. What is left one lane has, or
    // some that are alike: neighbours, so that a warp writes neighbours together.
    int first = 0, held = SUMS;
#pragma unroll
    for (int m = LANES / 2; m > 0; m /= 2) {
      if (held == 1) {
        sum[0] += shuffle_xor(sum[0], m);
        continue;
      }
      held /= 2;
      const bool upper = me & m;
#pragma unroll
      for (int i = 0; i < SUMS / 2; i++)
        if (i < held) sum[i] = (upper ? sum[i + held] : sum[i]) + shuffle_xor(upper ? sum[i] : sum[i + held], m);
      first += upper ? held : 0;
    }
    if (me % (LANES > SUMS ? LANES / SUMS : 1) == 0)
#pragma unroll
      for (int i = 0; i < (SUMS > LANES ? SUMS / LANES : 1); i++) finish((first + i) / ROWS, n0 + (first + i) % ROWS, sum[i]);
  } else {
    const int n0 = slab * COLUMNS, n = n0 + me * PIECE;
    Sum sum[VECTORS][PIECE] = {};
    where_multiplied([&](const T* const (&vector)[VECTORS], const T* rows) {
      // Rows of W beyond its last are that one, times zero.
      auto multiply = [&](auto load) {
        Piece<PIECE> own[ROWS], next[ROWS];
        Sum factor[VECTORS][ROWS];
        auto rows_from = [&](int k, Piece<PIECE>(&to)[ROWS]) {
#pragma unroll
          for (int r = 0; r < ROWS; r++) load(to[r], rows + (i64)min_of(k + r, K - 1) * w_row + n);
        };
        int k = group * ROWS;
        if (Config::AHEAD && k < K) rows_from(k, own);
#pragma unroll 1
        for (; k < K; k += GROUPS * ROWS) {
          rows_from(Config::AHEAD ? k + GROUPS * ROWS : k, Config::AHEAD ? next : own);
#pragma unroll
          for (int f = 0; f < VECTORS; f++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
              factor[f][r] = k + r < K ? to_sum(vector[f][(i64)min_of(k + r, K - 1) * x_k]) : Sum(0);
#pragma unroll
          for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int e = 0; e < PIECE; e++) {
              const Sum y = k + r < K ? own[r].at(e) : Sum(0);
#pragma unroll
              for (int f = 0; f < VECTORS; f++) sum[f][e] += factor[f][r] * y;
            }
          if (Config::AHEAD)
#pragma unroll
            for (int r = 0; r < ROWS; r++) own[r] = next[r];
        }
      };
      if (n + PIECE <= N) multiply([](Piece<PIECE>& to, const T* from) { to.load(from); });
      else if (n < N) multiply([&](Piece<PIECE>& to, const T* from) { to.load(from, N - n); });
    });
#pragma unroll
    for (int f = 0; f < VECTORS; f++)
#pragma unroll
      for (int e = 0; e < PIECE; e++)
#pragma unroll
        for (int m = LANES; m < WARP; m *= 2) sum[f][e] += shuffle_xor(sum[f][e], m);
    Sum* const parts = (Sum*)shared_memory<Config::SHARED_BYTES>();
    const int warp = warp_index();
    if (lane() < LANES)
#pragma unroll
      for (int f = 0; f < VECTORS; f++)
#pragma unroll
        for (int e = 0; e < PIECE; e++) parts[(warp * VECTORS + f) * COLUMNS + me * PIECE + e] = sum[f][e];
    block_barrier();
    for (int i = thread_index(); i < VECTORS * COLUMNS; i += THREADS) {
      Sum whole = 0;
#pragma unroll
      for (int p = 0; p < WARPS; p++) whole += parts[p * VECTORS * COLUMNS + i];
      finish(i / COLUMNS, n0 + i % COLUMNS, whole);
    }
  }
}
