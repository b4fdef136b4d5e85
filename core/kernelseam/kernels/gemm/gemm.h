// Batched GEMM: C[i] = alpha · Σ op(A) · op(B) (· scales of its row and its column) + beta · C[i] + bias[i] + residual[i], and what an
// epilogue makes of that (epilogue.h), for every matrix C[i] of a strided batch or of a list of addresses, in one launch; the sum
// over one product, or over those of several batches and heads. Sums and maxima in the epilogue: reductions.h.
//
// Algorithm: the work is cut into BM×BN tiles of all the C's. As many blocks start as the device holds at once, and each
// takes every gridDim-th tile. Tiles of A and B come through shared memory in slices of BK, STAGES of them in a ring that
// runs on from one product to the next and from one tile of C to the next: the first slices of the next tile are copied
// while this one is multiplied and written. Warps split a tile WARPS_M × WARPS_N; each holds its accumulators in
// registers. At the end of a tile the epilogue is applied, the result is rounded once, laid out in shared memory and
// written in whole rows: to C, or to the heads of three operands (heads.h).
// Where PERSISTENT is 0 there are as many blocks as tiles, each computes one, and the result is laid out where the ring
// was: less shared memory and fewer registers, for devices that rather hold several blocks at once.
// With scales of blocks along K the products of a block are summed from 0, multiplied by their scales and then added up.
// With groups (GROUPED: groups.h) one axis of the operands is divided by offsets in device memory, or each product has its own size.
// Where TEAMS is more than 1, a block computes that many small tiles at once, each by a warp with a ring of its own.
//
// Shared memory, for each team: STAGES · (BM + BN) · BK elements, and (or, not persistent, at least) BM · BN elements of C.
// Registers: BM·BN / threads accumulators, with scales of blocks twice, plus one slice's operands.
#include "tile/tile.h"
#include "gemm/scales.h"

typedef Config::T T;
typedef Config::TC TC;
typedef Engine<T, T, Config::PRECISION> E;
typedef E::Sum Sum;

typedef optional<Config::BIAS> Bias;
typedef optional<Config::RESIDUAL> Residual;
typedef optional<Config::ROW_SUMS> RowSums;

constexpr int BM = Config::BM, BN = Config::BN, BK = Config::BK, WARPS_M = Config::WARPS_M, WARPS_N = Config::WARPS_N, STAGES = Config::STAGES;
constexpr int TEAMS = Config::TEAMS, THREADS = WARP * WARPS_M * WARPS_N, WM = BM / WARPS_M, WN = BN / WARPS_N;
constexpr int AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1, K_STEP = K_PIECE<E, BK>;
typedef E::Tile<BM, BK, !Config::A_TRANSPOSED> TileA;
// Columns of a tile that lie together in B: all of them, or a half of each half of the columns.
constexpr int PARTS = Config::PAIRS == 1 ? 2 : 1, PN = BN / PARTS, WPN = WN / PARTS;
typedef E::Tile<PN, BK, Config::B_TRANSPOSED> TileB;
typedef PlainTile<TC, WM, WPN> TileSums;
typedef PlainTile<TC, WM, Config::PAIRS ? WN / 2 : WN> TileC;
constexpr int STAGE_BYTES = TileA::BYTES + PARTS * TileB::BYTES, RESULT = Config::PERSISTENT ? STAGES * STAGE_BYTES : 0;
constexpr int TEAM_BYTES = Config::SHARED_BYTES / TEAMS;
static_assert(STAGES * STAGE_BYTES <= TEAM_BYTES, "the ring fits");
static_assert(RESULT + WARPS_M * WARPS_N * TileSums::BYTES <= TEAM_BYTES, "the result fits");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");
static_assert(TEAMS == 1 || WARPS_M * WARPS_N == 1, "of several teams each is a warp");

KS_DEVICE void team_barrier() {
  if (TEAMS > 1) warp_barrier();
  else block_barrier();
}

// Rows of operands whose base is loaded from a list in the arguments: on AMD no scalar registers are left for it (copy.h).
template<class T> struct SegmentView : StridedView<T> {};
typedef conditional<Config::SEGMENTED, SegmentView<const T>, StridedView<const T>>::type View;

static_assert(Config::SCALE_K % K_STEP == 0 && (Config::SCALE_K % BK == 0 || BK % max_of(Config::SCALE_K, 1) == 0), "slices and blocks nest");

KS_DEVICE int half_of(int n) { return (unsigned)n / 2; }

#include "gemm/epilogue.h"
#include "gemm/reductions.h"
#include "gemm/heads.h"
#include "gemm/groups.h"

// Where alpha or K is 0 the host passes both as 0: A and B are then not read.
// a, b, c, bias, residual, sums: the first of each, or lists of addresses. Strides in elements. num_heads: C's; each sums
// batch_group · head_group products.
KS_BODY(THREADS * TEAMS, Config::MIN_BLOCKS)
gemm_body(const void* a, const void* b, void* c, const void* bias, const void* residual, void* sums, i64 a_batch, i64 a_head,
     i64 b_batch, i64 b_head, i64 c_batch, i64 c_head, i64 bias_batch, i64 bias_head, i64 residual_batch,
     i64 residual_head, i64 sums_batch, i64 sums_head, int a_row, int b_row, int c_row, int residual_row, int M, int N,
     int K, int num_heads, int batch_group, int head_group, int b_head_group, int tiles_m, int tiles_n, unsigned total,
     unsigned blocks, Sum alpha, Sum beta, const Segments& segments, const Heads& heads, const Groups& groups,
     const RowIndices& indices, const Scales& scales, const EpilogueArguments& epilogue, const EpilogueParts<Config::REDUCTIONS>& parts) {
  const int team = TEAMS > 1 ? warp_index() : 0, warp = TEAMS > 1 ? 0 : warp_index();
  char* const memory = shared_memory<Config::SHARED_BYTES>() + team * TEAM_BYTES;
  const int warp_m = warp % WARPS_M * WM, warp_n = warp / WARPS_M * WPN;
  const int slices = divide_up(K, BK), terms = Config::SUMMED ? batch_group * head_group : 1;

  // A tile of C, counted up without divisions: its place in its matrix, and its matrix.
  struct Place {
    int m, n, head, batch;
    // 1 where x passed its end, and x brought back.
    static KS_DEVICE int carry(int& x, int end) {
      const bool over = x >= end;
      x -= over ? end : 0;
      return over;
    }
    KS_DEVICE void operator+=(const Place& step) {  // by less than a grid of tiles
      m += step.m;
      n += step.n + carry(m, step.tiles_m);
      head += step.head + carry(n, step.tiles_n);
      batch += step.batch + carry(head, step.heads);
    }
    int tiles_m, tiles_n, heads;
    int begin, size;  // of a group, whose number is `batch`
    int M, N, K;      // of a list's group
    unsigned first;   // its first tile
  };
  auto place = [&](unsigned tile, const Place& from) {
    if constexpr (Config::GROUPED == BY_LIST) {
      int group = from.batch;
      unsigned first = from.first;
      groups.find<BM, BN>(tile, group, first);
      const int rows = groups.of_list(group, OF_M), in_group = tile - first, high = divide_up(rows, BM), n = in_group / max_of(high, 1);
      return Place{in_group - n * high, n, 0, group, tiles_m, tiles_n, num_heads, 0, 0,
                   rows, groups.of_list(group, OF_N), groups.of_list(group, OF_K), first};
    }
    if constexpr (Config::GROUPED) {
      const GroupTile x = groups.tile<BM, BN>(tile, tiles_m, tiles_n);
      return Place{x.m, x.n, 0, x.group, tiles_m, tiles_n, num_heads, x.begin, x.size};
    }
    const unsigned strip = tile / tiles_m, matrix = strip / tiles_n, batch = matrix / num_heads;
    return Place{(int)(tile - strip * tiles_m), (int)(strip - matrix * tiles_n), (int)(matrix - batch * num_heads),
                 (int)batch, tiles_m, tiles_n, num_heads};
  };
  const unsigned stride = blocks * TEAMS;
  // What a tile's group, or its matrix, has in rows, columns and slices; `empty`: a tile of no rows, or of no columns.
  constexpr bool LIST = Config::GROUPED == BY_LIST;
  auto rows_of = [&](const Place& at) { return LIST ? at.M : Config::GROUPED == ALONG_M ? at.size : M; };
  auto columns_of = [&](const Place& at) { return LIST ? at.N : Config::GROUPED == ALONG_N ? at.size : N; };
  auto depth_of = [&](const Place& at) { return LIST ? at.K : Config::GROUPED == ALONG_K ? at.size : K; };
  auto empty = [&](const Place& at) { return at.m * BM >= rows_of(at) || at.n * BN >= columns_of(at); };
  auto slices_of = [&](const Place& at) { return !Config::GROUPED ? slices : empty(at) || K == 0 ? 0 : divide_up(depth_of(at), BK); };
  // Elements from an operand's first to its group's.
  auto group_start = [&](const Place& at, bool stacked, i64 by_group, bool by_rows, int row) {
    return stacked ? at.batch * by_group : by_rows ? (i64)at.begin * row : at.begin;
  };
  const Place step = Config::PERSISTENT && !Config::GROUPED ? place(stride, Place{}) : Place{};
  auto go_on = [&](unsigned& tile, Place& at) {
    tile += stride;
    if (!Config::GROUPED) at += step;
    else if (tile < total) at = place(tile, at);
  };
  // The matrix of `heads` a batch that belongs to a batch and a head, in a strided batch or in a list.
  auto matrix_at = [&](auto base, int batch, int head, int heads, i64 by_batch, i64 by_head) {
    if (Config::POINTERS) return listed(base, (i64)batch * heads + head);
    return base + batch * by_batch + head * by_head;
  };

  // The ring's far end: what is to be copied next.
  Copy<TileA, THREADS, Config::VECTOR_A, false> copy_a;
  Copy<TileB, THREADS, Config::VECTOR_B, false> copy_b[PARTS];
  auto tile_a = [&](int stage) { return TileA(memory + stage * STAGE_BYTES); };
  auto tile_b = [&](int stage, int part) { return TileB(memory + stage * STAGE_BYTES + TileA::BYTES + part * TileB::BYTES); };
  unsigned next_tile = block_index() * TEAMS + team;
  Place next = place(next_tile, Place{}), at = next;
  int next_slice = 0, next_term = 0, far = 0;
  auto skip_empty = [&] {
    if constexpr (Config::GROUPED)
      while (next_tile < total && slices_of(next) == 0) go_on(next_tile, next);
  };
  skip_empty();
  View A{nullptr, a_row}, B{nullptr, b_row};
  auto next_product = [&] {
    if constexpr (LIST) {
      A = {listed((const T*)a, next.batch), groups.of_list(next.batch, ROW_OF_A)};
      B = {listed((const T*)b, next.batch), groups.of_list(next.batch, ROW_OF_B)};
      return;
    }
    if constexpr (Config::GROUPED) {
      if (!Config::GATHERED)
        A.base = (const T*)a + group_start(next, Config::GROUPED == ALONG_N, a_batch, (Config::GROUPED == ALONG_M) != Config::A_TRANSPOSED, a_row);
      B.base = (const T*)b + group_start(next, Config::GROUPED == ALONG_M, b_batch, (Config::GROUPED == ALONG_K) != Config::B_TRANSPOSED, b_row);
      return;
    }
    const int groups = Config::SUMMED ? next_term / head_group : 0;
    const int batch = Config::SUMMED ? next.batch * batch_group + groups : next.batch;
    const int head = Config::SUMMED ? next.head * head_group + next_term - groups * head_group : next.head;
    const int heads_in_all = Config::SUMMED ? num_heads * head_group : num_heads;
    if constexpr (Config::SEGMENTED) {
      const auto& from = segments.of[(head >= segments.of[1].first) + (head >= segments.of[2].first)];
      A = {(const T*)from.base + batch * from.batch + (head - from.first) * from.head, from.row};
    } else {
      A.base = matrix_at((const T*)a, batch, head, heads_in_all, a_batch, a_head);
    }
    const int b_head_index = Config::POINTERS || b_head_group == 1 ? head : head / b_head_group;
    B.base = matrix_at((const T*)b, batch, b_head_index, heads_in_all, b_batch, b_head);
  };
  auto fetch = [&] {
    if (next_tile < total) {
      if (next_slice == 0) next_product();
      const int M = rows_of(next), N = columns_of(next), K = depth_of(next);
      const int k0 = next_slice * BK, m0 = next.m * BM;
      if constexpr (Config::GATHERED) copy_a.fetch(tile_a(far), IndexedRows<const T, true>{{(const T*)a, a_row}, indices, next.begin, M - 1}, m0, M, k0, K);
      else if constexpr (TileA::K_LAST) copy_a.fetch(tile_a(far), A, m0, M, k0, K);
      else copy_a.fetch(tile_a(far), A, k0, K, m0, M);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int n0 = next.n * PN + part * half_of(N), n1 = PARTS == 1 ? N : (part + 1) * half_of(N);
        if constexpr (Config::HEADS) copy_b[part].fetch(tile_b(far, part), heads.weight_rows(B), n0, n1, k0, K);
        else if constexpr (TileB::K_LAST) copy_b[part].fetch(tile_b(far, part), B, n0, n1, k0, K);
        else copy_b[part].fetch(tile_b(far, part), B, k0, K, n0, n1);
      }
      if (++next_slice == slices_of(next)) {
        next_slice = 0;
        if (++next_term == terms) {
          next_term = 0;
          if (Config::PERSISTENT) go_on(next_tile, next);
          else next_tile = total;
          skip_empty();
        }
      }
    }
    if (++far == STAGES) far = 0;
    copies_commit();
  };
  if (Config::GROUPED || slices)
#pragma unroll
    for (int s = 0; s < AHEAD; s++) fetch();

  // Where a tile of the result goes, and what is added to it comes from. Set up before the products where a block has one tile:
  // that frees scalar registers. Else after them: what the host passed is at hand all the time.
  struct Ends {
    TC* c;
    const Bias::type* bias;
    const Residual::type* residual;
    const float KS_GLOBAL *by_row, *by_column;  // said, because of a pointer in a structure no compiler finds out
  };
  auto scales_of_rows = [&](const Place& at) {
    if (Config::GATHERED) return (const float KS_GLOBAL*)scales.a.base;
    if (Config::GROUPED)
      return (const float KS_GLOBAL*)scales.a.base + group_start(at, Config::GROUPED != ALONG_M, scales.a.batch, true, scales.a.row);
    return (const float KS_GLOBAL*)matrix_at(scales.a.base, at.batch, at.head, num_heads, scales.a.batch, scales.a.head);
  };
  auto scales_of_columns = [&](const Place& at) {
    if (Config::GROUPED)
      return (const float KS_GLOBAL*)scales.b.base + group_start(at, Config::GROUPED != ALONG_N, scales.b.batch, true, scales.b.row);
    return (const float KS_GLOBAL*)matrix_at(scales.b.base, at.batch, Config::POINTERS ? at.head : at.head / b_head_group, num_heads,
                                             scales.b.batch, scales.b.head);
  };
  constexpr bool BY_ROWS = Config::SCALES && !Config::SCALE_K;  // a scale each of rows and columns
  auto scale_row = [&](const Place& at, int m) { return Config::GATHERED ? indices.row_of_a(at.begin + m) : m; };
  auto ends_of = [&](const Place& at) {
    auto one = [&](auto base, i64 by_batch, i64 by_head) {
      return matrix_at(base, at.batch, at.head, num_heads, by_batch, by_head);
    };
    TC* const first = Config::SCATTERED ? (TC*)c
                      : LIST ? listed((TC*)c, at.batch)
                      : Config::GROUPED ? (TC*)c + group_start(at, Config::GROUPED == ALONG_K, c_batch, Config::GROUPED == ALONG_M, c_row)
                      : Config::HEADS ? (TC*)c : one((TC*)c, c_batch, c_head);
    return Ends{first,
                Bias::THERE ? one((const Bias::type*)bias, bias_batch, bias_head) : nullptr,
                Residual::THERE ? one((const Residual::type*)residual, residual_batch, residual_head) : nullptr,
                // Where nothing is multiplied, scales are not there to be read, nor is a list of them.
                BY_ROWS && K > 0 ? scales_of_rows(at) : nullptr, BY_ROWS && K > 0 ? scales_of_columns(at) : nullptr};
  };

  int stage = 0;
  for (unsigned tile = block_index() * TEAMS + team; tile < total; go_on(tile, at)) {
    if (Config::GROUPED && empty(at)) continue;
    const int M = rows_of(at), N = columns_of(at), slices = slices_of(at);
    typedef E::Acc<WM, WPN> Acc;
    Acc acc[PARTS];
    // f(accumulators, first column of the warp's, end of the columns, part) for each part.
    auto each_part = [&](Acc (&accs)[PARTS], auto f) {
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        f(accs[part], at.n * PN + warp_n + part * half_of(N), PARTS == 1 ? N : (part + 1) * half_of(N), part);
    };
    each_part(acc, [](Acc& x, int, int, int) { E::zero(x); });
    constexpr int SUM_ROWS = RowSums::THERE ? (BM + THREADS - 1) / THREADS : 1;  // of a thread
    const int me = TEAMS > 1 ? lane() : thread_index();
    // Of the tiles that hold the same rows one sums them: heads may share a left factor, and so its sums.
    typedef RowSums::type KS_GLOBAL* Sums;  // said, because of a pointer that may be null no compiler finds out
    const Sums sums_of = RowSums::THERE && at.n == 0 && (at.head == 0 || sums_head != 0)
        ? (Sums)sums + at.batch * sums_batch + at.head * sums_head : nullptr;
    Sum row_sums[SUM_ROWS] = {};
    Ends ends;
    if (!Config::PERSISTENT && !Config::SCALE_K) ends = ends_of(at);
    const float KS_GLOBAL *of_rows, *of_columns;
    Acc of_block[PARTS];  // of a block along K
    if constexpr (Config::SCALE_K) {
      of_rows = scales_of_rows(at), of_columns = scales_of_columns(at);
      each_part(of_block, [](Acc& x, int, int, int) { E::zero(x); });
    }
    auto& sums_of_slices = one_of<(Config::SCALE_K > 0)>(of_block, acc);
    auto add_block = [&](int block) {
      // Beyond the last row and column the last one's: what they scale is not stored.
      const int row0 = at.m * BM + warp_m;
      const auto by_row = of_rows + (i64)block * scales.a.k, by_column = of_columns + (i64)block * scales.b.k;
      E::Row<WM> factors;
      E::row_map(factors, [&](int i, float) { return by_row[(i64)(scale_row(at, min_of(row0 + i, M - 1)) / max_of(Config::SCALE_M, 1)) * scales.a.row]; });
      each_part(of_block, [&](Acc& block, int col0, int, int part) {
        E::row_apply(block, factors, [](float x, float y) { return x * y; });
        E::map2(acc[part], block, [&](int, int j, float x, float y) {
          return x + y * by_column[(i64)(min_of(col0 + j, N - 1) / max_of(Config::SCALE_N, 1)) * scales.b.row];
        });
        E::zero(block);
      });
    };
    for (int slice = 0; slice < slices * terms; slice++) {
      copies_wait<AHEAD - 1>();
      if (STAGES == 1) team_barrier();  // everyone has multiplied the slice that lay here
      copy_a.land(tile_a(stage));
#pragma unroll
      for (int part = 0; part < PARTS; part++) copy_b[part].land(tile_b(stage, part));
      team_barrier();  // this slice is visible to all, and the stage refilled below is no longer read
      fetch();
#pragma unroll
      for (int k = 0; k < BK; k += K_STEP) {
        const auto left = E::template operand<WM, K_STEP>(tile_a(stage), warp_m, k);
#pragma unroll
        for (int part = 0; part < PARTS; part++) E::mma(sums_of_slices[part], left, tile_b(stage, part), warp_n, k);
        if constexpr (Config::SCALE_K) {
          constexpr int BLOCK = max_of(Config::SCALE_K, 1);
          const int k_end = slice * BK + k + K_STEP;
          if (BK % BLOCK == 0) {  // beyond K there are neither products nor scales
            if ((k + K_STEP) % BLOCK == 0 && k_end - BLOCK < K) add_block(k_end / BLOCK - 1);
          } else if (k + K_STEP == BK && (k_end % BLOCK == 0 || slice + 1 == slices)) {
            add_block((k_end - 1) / BLOCK);
          }
        }
      }
      if (RowSums::THERE && sums_of)
#pragma unroll
        for (int r = 0; r < SUM_ROWS; r++)
          if (BM % THREADS == 0 || me + r * THREADS < BM)
#pragma unroll 2
            for (int k = 0; k < BK; k++) row_sums[r] += (Sum)to_sum(tile_a(stage).element(me + r * THREADS, k));
      if (++stage == STAGES) stage = 0;
    }

    const int row0 = at.m * BM + warp_m;
    if (Config::PERSISTENT || Config::SCALE_K) ends = ends_of(at);
    if constexpr (RowSums::THERE) {
#pragma unroll
      for (int r = 0; r < SUM_ROWS; r++) {
        const int i = me + r * THREADS, m = at.m * BM + i;
        if (sums_of && i < BM && m < M) sums_of[m] = convert<RowSums::type>(row_sums[r]);
      }
    }
    TileC out(memory + RESULT + warp * TileSums::BYTES);
    const auto C = [&] {
      if constexpr (Config::SCATTERED) return IndexedRows<TC, false>{{ends.c, c_row}, indices, at.begin, M - 1};
      else return StridedView<TC>{ends.c, LIST ? groups.of_list(at.batch, ROW_OF_C) : c_row};
    }();
    each_part(acc, [&](Acc& acc, int col0, int N, int) {
      if (BY_ROWS && K > 0) E::map(acc, [&](int i, int j, Sum x) {
        const int m = row0 + i;
        const i64 n = col0 + j;
        return m < M && n < N ? x * ends.by_row[scale_row(at, m) * (i64)scales.a.row] * ends.by_column[n * scales.b.row] : x;
      });
      if (alpha != Sum(1)) E::map(acc, [=](int, int, Sum x) { return alpha * x; });
      if constexpr (Config::FACTORS) E::map(acc, [&](int i, int, Sum x) { return row0 + i < M ? x * indices.factor(at.begin + row0 + i) : x; });
      if (Bias::THERE) {
        E::map(acc, [&](int, int j, Sum x) {
          if (col0 + j >= N) return x;
          return x + (Sum)to_sum(ends.bias[Config::HEADS ? heads.order.weight_row(col0 + j) : col0 + j]);
        });
      }
      if constexpr (Config::HEADS) heads.rotate(acc, at.batch, row0, M, col0, N);
      if (!Config::HEADS && !Config::PAIRS && beta != Sum(0))
        E::map(acc, [&](int i, int j, Sum x) {
          return row0 + i < M && col0 + j < N ? x + beta * (Sum)to_sum(C.row(row0 + i)[col0 + j]) : x;
        });
      if (!Config::HEADS && Residual::THERE) {
        const StridedView<const Residual::type> from{ends.residual, residual_row};
        E::map(acc, [&](int i, int j, Sum x) {
          return row0 + i < M && col0 + j < N ? x + (Sum)to_sum(from.row(row0 + i)[col0 + j]) : x;
        });
      }
    });
    if (Config::PERSISTENT) warp_barrier();  // the warp has written its last tile from here
    else team_barrier();  // the ring is no longer read
    if constexpr (Config::PREACTIVATION) {
      const auto& results = epilogue.results;
      TC* const first = [&] {
        TC* const base = (TC*)results.preactivation;
        if constexpr (Config::SCATTERED) return base;
        else if constexpr (Config::GROUPED) return base + group_start(at, false, 0, true, results.row);
        else return matrix_at(base, at.batch, at.head, num_heads, results.batch, results.head);
      }();
      each_part(acc, [&](Acc& acc, int col0, int N, int) {
        const TileSums sums_out(memory + RESULT + warp * TileSums::BYTES);
        E::to_shared(sums_out, acc);
        warp_barrier();
        const auto rows = [&] {
          if constexpr (Config::SCATTERED) return IndexedRows<TC, false>{{first, results.row}, indices, at.begin, M - 1};
          else return StridedView<TC>{first, results.row};
        }();
        warp_copy_out<Config::VECTOR_P>(sums_out, rows, row0, M, col0, N);
        warp_barrier();
      });
    }
    constexpr int PER_COLUMN = Config::PAIRS ? 2 : 1;
    const int col0 = at.n * (BN / PER_COLUMN) + warp_n * PARTS / PER_COLUMN, columns = Config::PAIRS ? half_of(N) : N;
    if constexpr (Config::EPILOGUE) {
      const Epilogue own = epilogue.captured();
      const auto tile = own.tile(epilogue.results.number(at.batch, at.head));
      const int m0 = row0 + (Config::GROUPED ? at.begin : epilogue.results.rows_before(at.head));
      if constexpr (Config::PAIRS == HALVES) {
        E::map2(acc[0], acc[PARTS - 1], [&](int i, int j, Sum gate, Sum up) {
          return own.value(gate, up, tile, own.row(tile, m0 + i), own.column(tile, col0 + j));
        });
      } else if constexpr (Config::PAIRS == NEIGHBOURS) {
        E::map_pairs(acc[0], [&](int i, int j, Sum& gate, Sum& up) {
          const Sum x = own.value(gate, up, tile, own.row(tile, m0 + i), own.column(tile, col0 + j / 2));
          if constexpr (Config::REDUCTIONS) gate = x;
          else out.at(i, j / 2) = convert<TC>(x);
        });
      } else {
        E::map(acc[0], [&](int i, int j, Sum x) { return own.value(x, tile, own.row(tile, m0 + i), own.column(tile, col0 + j)); });
      }
      if constexpr (Config::REDUCTIONS) {
        const EpilogueBlock block{epilogue.results.number(at.batch, at.head), m0, col0, M - row0, columns - col0};
        take_reductions<E, WM, WPN, Config::PAIRS == NEIGHBOURS ? 2 : 1, 0>(own, tile, acc[0], block, parts);
        if constexpr (Config::PAIRS == NEIGHBOURS)
          E::map_pairs(acc[0], [&](int i, int j, Sum& x, Sum&) { out.at(i, j / 2) = convert<TC>(x); });
      }
    }
    if constexpr (Config::PAIRS != NEIGHBOURS) E::to_shared(out, acc[0]);
    warp_barrier();
    if constexpr (Config::HEADS) heads.copy_out(out, at.batch, row0, M, col0, N);
    else warp_copy_out<Config::VECTOR_C>(out, C, row0, M, col0, columns);
    if (!Config::PERSISTENT) break;
  }
}
