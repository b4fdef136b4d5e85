// A consumer warpgroup: MT·64 rows of the block's tile, or in PING_PONG all of every other tile.
#pragma once
#include "sm90/gemm/epilogue.h"
#include "sm90/gemm/expression.h"
#include "sm90/gemm/panels.h"
#include "sm90/gemm/split_sums.h"
#include "sm90/gemm/tail_sums.h"

struct Consumer {
  SharedStorage& storage;
  const Ring<STAGES>& ring;
  const Ring<SLOTS>& out_ring;
  const Arguments& a;
  const Scheduler& scheduler;
  const Result& result;
  int rank, split_rank, group, warp, thread_lane;
  PipelineState<STAGES> state{0, 0};
  PipelineState<SLOTS> out_state{0, 1};

  KS_DEVICE int thread() const { return warp * WARP + thread_lane; }
  // Of the tiles of 64 rows its first; of its accumulators' rows and of their columns, this thread's first in them.
  KS_DEVICE int first_rows() const { return first_rows_of(group); }
  KS_DEVICE int first_row(int at) const { return 64 * first_rows() + 16 * warp + (at >> 2); }
  KS_DEVICE int first_row() const { return first_row(thread_lane); }
  // Releases a stage: arrives at its empty barrier in every block that loads into it.
  KS_DEVICE void release(const PipelineState<STAGES>& from) const {
    const int releasing = RELEASES > 1 ? thread_lane : thread();
    if (CLUSTER == 1) {
      if (releasing == 0) barrier_arrive(ring.empty(from));
    } else {
      if (releasing < CLUSTER) barrier_arrive_at(ring.empty(from), releasing);
    }
  }

  // Clears rows of a slice of A, the consumer's part, and of B, both of which lie along M and N: those behind the end of a group.
  KS_DEVICE void clear_behind(u32 stage, int rows) const {
    static_assert(!GROUPED_K || (Config::A_TRANSPOSED && !Config::B_TRANSPOSED), "rows of a slice are those of what is summed over");
    const u32 a_panels = stage + first_rows() * ROWS_BYTES, b_panels = stage + A_BYTES;
#pragma unroll 1
    for (int at = rows * 128 + thread() * 16; at < ROWS_BYTES; at += 128 * 16) {
#pragma unroll
      for (int i = 0; i < MT; i++) store_zeros(a_panels + i * ROWS_BYTES + at);
#pragma unroll
      for (int i = 0; i < PANELS; i++) store_zeros(b_panels + i * ROWS_BYTES + at);  // by either consumer: each needs it
    }
    async_proxy_fence();
    named_barrier_sync(1 + group, 128);
  }

  // summing: the sums of A's rows, too, by products with ones; each is in all columns of its row. (A branch about the loop,
  // with a loop for either way, has the products serialised.)
  KS_DEVICE void mainloop(float (&acc)[MT][BN / 2], float (&sums)[MT][4], bool summing, const TileCoord& p) {
    constexpr int A_STEP = Config::A_TRANSPOSED ? 16 * 128 : 32, B_STEP = Config::B_TRANSPOSED ? 32 : 16 * 128;
    auto descriptor = [](bool k_major, u32 address) {
      return k_major ? descriptor_k_major(address) : descriptor_mn_major(address, ROWS_BYTES);
    };
    PipelineState<STAGES> previous = state;
    const int slices = Config::SUMMED ? a.slices * a.batch_group * a.head_group
                       : SPLIT > 1 ? part_of(a.slices, split_rank).count : slices_of(a, p);
    if (EMPTY_SUMS)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < BN / 2; e++) acc[i][e] = 0;
    if (PING_PONG) named_barrier_sync(TURN + group, CONSUMERS);
    u32 ones = 0;
    if constexpr (RowSums::THERE) {
      ones = descriptor_k_major(shared_address(storage.ones()));
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[i][e] = 0;
    }
#pragma unroll 1
    for (int s = 0; s < slices; s++) {
      const u32 stage = shared_address(storage.stages[state.stage]);
      const u32 a_descriptor = descriptor(!Config::A_TRANSPOSED, stage + first_rows() * ROWS_BYTES);
      const u32 b_descriptor = descriptor(Config::B_TRANSPOSED, stage + A_BYTES);
      ring.wait_full(state);
      if (Config::GATHERED) async_proxy_fence();  // what cp.async wrote comes before what wgmma reads
      if (GROUPED_K && s == slices - 1 && (p.end - p.begin) % BK) clear_behind(stage, (p.end - p.begin) % BK);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)  // 32 bytes of K each
#pragma unroll
        for (int i = 0; i < MT; i++) {
          Wgmma<T, BN>::template ss<Config::A_TRANSPOSED, !Config::B_TRANSPOSED>(
              acc[i], advanced(a_descriptor, i * ROWS_BYTES + k * A_STEP), advanced(b_descriptor, k * B_STEP), EMPTY_SUMS || (s | k));
          if (RowSums::THERE && summing)
            Wgmma<Half, 8>::template ss<Config::A_TRANSPOSED, 0>(
                sums[i], advanced(a_descriptor, i * ROWS_BYTES + k * A_STEP), ones, 1);
        }
      wgmma_commit();
      wgmma_wait<1>();  // the previous slice is done
      if (s) release(previous);
      previous = state;
      state.advance();
    }
    if (PING_PONG) {
      ring.wait_all_full(state, a.source_stages());  // the other waits for stages behind those by their parity alone
      named_barrier_arrive(TURN + 1 - group, CONSUMERS);  // the other's products go on behind these
    }
    wgmma_wait<0>();
    if (!EMPTY_SUMS || slices) release(previous);
  }

  // Of e4m3, of whose sums the units keep few bits: those of a slice alone, which float32 additions sum up. Another consumer's
  // products go on meanwhile: by chance, or IN_TURNS, each beginning when the other's have begun. HALVES: when their first half is done; and
  // those of the tile's second half of columns go on. Scales of blocks are those of a slice: the additions multiply by them.
  KS_DEVICE void mainloop_e4m3(float (&acc)[MT][BN / 2], const TileCoord& p) {
    const int slices = Config::SUMMED ? a.slices * a.batch_group * a.head_group
                       : SPLIT > 1 ? part_of(a.slices, split_rank).count : a.slices;
    constexpr int PARTS = Config::HALVES ? 2 : 1, COLUMNS = BN / PARTS;
    float part[PARTS][MT][COLUMNS / 2];
    float factors[MT][2][PANELS];  // of blocks
    auto add = [&](int n) {
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int e = 0; e < COLUMNS / 2; e++) {
          float& sum = acc[i][n * COLUMNS / 2 + e];
          if (Config::SCALE_K) sum = fmaf(part[n][i][e], factors[i][e >> 1 & 1][(n * COLUMNS / 2 + e) / 32], sum);
          else sum += part[n][i][e];
        }
    };
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int e = 0; e < BN / 2; e++) acc[i][e] = 0;
#pragma unroll 1
    for (int s = 0; s < slices; s++) {
      const u32 stage = shared_address(storage.stages[state.stage]);
      const u32 a_descriptor = descriptor_k_major(stage + first_rows() * ROWS_BYTES);
      const u32 b_descriptor = descriptor_k_major(stage + A_BYTES);
      ring.wait_full(state);
      if (Config::GATHERED) async_proxy_fence();
      if (Config::IN_TURNS) named_barrier_sync(TURN + group, CONSUMERS);
#pragma unroll
      for (int n = 0; n < PARTS; n++) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {  // 32 of K each
#pragma unroll
          for (int i = 0; i < MT; i++)
            Wgmma<T, COLUMNS>::ss(part[n][i], advanced(a_descriptor, i * ROWS_BYTES + k * 32),
                                  advanced(b_descriptor, n * COLUMNS * 128 + k * 32), k);
        }
        wgmma_commit();
      }
      if (Config::IN_TURNS && PARTS == 1) named_barrier_arrive(TURN + 1 - group, CONSUMERS);
      if constexpr (Config::SCALE_K != 0) {
        const float* const scales = storage.scales[state.stage];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < PANELS; n++)
              factors[i][half][n] = scales[first_row() + 64 * i + 8 * half] * scales[BM + n];
      }
      if constexpr (PARTS == 2) {
        wgmma_wait<1>();
        if (Config::IN_TURNS) named_barrier_arrive(TURN + 1 - group, CONSUMERS);
        pin(part[0][0]);
        add(0);
        pin(acc[0]);
      }
      wgmma_wait<0>();
      if (Config::SCALE_K) warp_barrier();  // all lanes have read the scales
      release(state);
      state.advance();
      add(PARTS - 1);
    }
  }

  // Adds factor · (tile of a source matrix), which comes through the ring.
  KS_DEVICE void add_source(float (&acc)[MT][BN / 2], float factor) {
    const int at = sizeof(TC) == 4 || Config::SUMMED || Config::EPILOGUE || PING_PONG ? opaque(thread_lane) : thread_lane;  // else it is kept, and spills
#pragma unroll
    for (int first = 0; first < C_PANELS; first += SOURCE_PANELS) {
      ring.wait_full(state);
      const u32 tile = shared_address(storage.stages[state.stage]) + (first_rows() * 4 + warp) * 16 * 128;
#pragma unroll
      for (int n = first; n < min_of(first + SOURCE_PANELS, C_PANELS); n++)
#pragma unroll
        for (int i = 0; i < MT; i++) {
          if (sizeof(TC) == 4 || Config::EPILOGUE || PING_PONG) pin(acc[i]);  // else the sums wait for all loads, which spill
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if constexpr (sizeof(TC) == 4) {
#pragma unroll
              for (int half = 0; half < 2; half++) {
                float* const d = &acc[i][16 * n + 4 * j + 2 * half];
                const Pair x = load_pair(tile + (n - first) * SOURCE_BYTES + i * ROWS_BYTES + pair_offset(at, j, half));
                d[0] = fmaf(factor, x.x, d[0]), d[1] = fmaf(factor, x.y, d[1]);
              }
            } else {
              u32 x[4];
              ldmatrix(tile + row_offset(at) + (n - first) * SOURCE_BYTES + i * ROWS_BYTES + chunk_offset(at, j), x);
#pragma unroll
              for (int e = 0; e < 4; e++) add_pair(&acc[i][32 * n + 8 * j + 2 * e], x[e], factor);
            }
          }
        }
      async_proxy_fence();  // reads by the generic proxy come before the writes by TMA that the release lets in
      named_barrier_sync(1 + group, 128);  // all four warps have read it
      release(state);
      state.advance();
    }
  }

  // f(accumulators of the thread's two rows and two columns, both columns' values, i) throughout the tile.
  template<class F>
  KS_DEVICE void each_column(float (&acc)[MT][BN / 2], const float (&fragment)[divide_up(BN, 128)], F f) {
    named_barrier_sync(1 + group, 128);  // what lay there before has been read
#pragma unroll
    for (int n = 0; n < divide_up(BN, 128); n++)
      if (thread() + 128 * n < BN) storage.columns[group][thread() + 128 * n] = fragment[n];
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int c = 0; c < BN / 8; c++) {
      const float* x = &storage.columns[group][8 * c + 2 * (thread_lane & 3)];
      const float x0 = x[0], x1 = x[1];
#pragma unroll
      for (int i = 0; i < MT; i++) f(&acc[i][4 * c], x0, x1, i);
    }
  }
  KS_DEVICE void add_bias(float (&acc)[MT][BN / 2], const float (&bias_fragment)[divide_up(BN, 128)]) {
    each_column(acc, bias_fragment, [](float* d, float x0, float x1, int) { d[0] += x0, d[1] += x1, d[2] += x0, d[3] += x1; });
  }
  // Those of this thread's rows, and of the columns that it brings to shared memory.
  struct ScaleFragment { float rows[MT][2], columns[divide_up(BN, 128)]; };
  KS_DEVICE ScaleFragment load_scales(const TileCoord& p) const {
    const auto &by_row = a.scales.a, &by_column = a.scales.b;
    const float* const rows =
        Config::POINTERS ? listed(by_row.base, p.matrix) : by_row.base + p.batch * by_row.batch + p.head * by_row.head;
    const float* const columns =
        Config::POINTERS ? listed(by_column.base, p.matrix)
                    : by_column.base + p.batch * by_column.batch + a.b_heads.quotient(p.head) * by_column.head;
    ScaleFragment x = {};
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = p.row + first_row() + 64 * i + 8 * half;
        if (row < end_of_rows(a, p)) x.rows[i][half] = rows[(i64)a.indices.row_of_a(row) * by_row.row];
      }
#pragma unroll
    for (int n = 0; n < divide_up(BN, 128); n++) {
      const int column = product_column(a, p, thread() + 128 * n);
      if (column < a.N) x.columns[n] = columns[(i64)column * by_column.row];
    }
    return x;
  }
  KS_DEVICE void multiply_by_scales(float (&acc)[MT][BN / 2], const ScaleFragment& s) {
    each_column(acc, s.columns, [&](float* d, float x0, float x1, int i) {
      d[0] = d[0] * s.rows[i][0] * x0, d[1] = d[1] * s.rows[i][0] * x1;
      d[2] = d[2] * s.rows[i][1] * x0, d[3] = d[3] * s.rows[i][1] * x1;
    });
  }

  // By which the rows of a group are multiplied: those of this thread.
  struct RowFactors { float of[MT][2]; };
  KS_DEVICE RowFactors load_factors(const TileCoord& p) const {
    RowFactors x = {};
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = p.row + first_row() + 64 * i + 8 * half;
        if (row < p.end) x.of[i][half] = a.indices.factor(row);
      }
    return x;
  }
  KS_DEVICE void multiply_by_factors(float (&acc)[MT][BN / 2], const RowFactors& x) const {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int e = 0; e < BN / 2; e++) acc[i][e] *= x.of[i][e >> 1 & 1];
  }

  KS_DEVICE void store_sums(const float (&sums)[MT][4], const TileCoord& p) const {
    auto* const to = (typename RowSums::type*)a.sums + p.batch * a.sums_batch + p.head * a.sums_head;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = p.row + first_row() + 64 * i + 8 * half;
        if ((thread_lane & 3) == 0 && row < a.M) to[row] = convert<typename RowSums::type>(sums[i][2 * half]);
      }
  }

  typedef conditional<PING_PONG || Config::EPILOGUE || GROUPS == 3, int, const int&>::type Lane;  // by value it is another order of registers
  // Where chunk 2j + lane/16 of a panel goes in a warp's rows of an epilogue buffer: as chunk_offset has it; or, where boxes
  // are of 32 columns, into the first or the second half of the buffer, rows of 64 bytes in the 64-byte swizzle.
  KS_DEVICE u32 buffer_place(u32 panel, int j, Lane at) const {
    if constexpr (Result::BOX_BYTES == 128) return panel + row_offset(at) + chunk_offset(at, j);
    const int chunk = 2 * (j & 1) + (at >> 4);
    return panel + j / 2 * (ROWS_BYTES / 2) + (at & 15) * 64 + (chunk ^ (at >> 1 & 3)) * 16;
  }

  // SUMS: what an epilogue is of, else the result. make(panel, panels): makes these, while those before are stored.
  template<bool SUMS, class Make> KS_DEVICE void store(float (&acc)[MT][BN / 2], const TileCoord& p, const StoredRows& to_rows, Make make) {
    constexpr bool APART = Config::PAIRS == NEIGHBOURS && !SUMS;  // a thread has no two neighbours of the result
    constexpr int WIDTH = SUMS ? BN : BN / PER_COLUMN;
    const int at = sizeof(TC) == 4 || Config::EPILOGUE || PING_PONG || GROUPS == 3 ? opaque(thread_lane) : thread_lane;
#pragma unroll
    for (int first = 0; first < (SUMS ? SUM_PANELS : C_PANELS); first += BATCH)
#pragma unroll
      for (int i = 0; i < MT; i++, out_state.advance()) {
        if (i == 0) make(first, BATCH);
        if (Config::STORE == TMA) out_ring.wait_empty(out_state);
        char* const to = storage.out[group][out_state.stage * BATCH] + warp * 16 * Result::BOX_BYTES;
#pragma unroll
        for (int n = 0; n < BATCH; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (WIDTH % C_COLUMNS && C_COLUMNS * (first + n) + C_COLUMNS / 4 * j >= WIDTH) break;
            if constexpr (APART) {
              store_apart<Result::BOX_BYTES>(to + n * ROWS_BYTES, &acc[i][C_COLUMNS * (first + n)], j, at);
            } else if constexpr (sizeof(TC) == 1) {
              store_bytes<Result::BOX_BYTES>(to + n * ROWS_BYTES, &acc[i][64 * (first + n)], j, at);
            } else if constexpr (sizeof(TC) == 4) {
              const float* d = &acc[i][16 * (first + n) + 4 * j];
              store_pair(shared_address(to) + n * ROWS_BYTES + pair_offset(at, j, 0), d[0], d[1]);
              store_pair(shared_address(to) + n * ROWS_BYTES + pair_offset(at, j, 1), d[2], d[3]);
            } else {
              const float* d = &acc[i][32 * (first + n) + 8 * j];
              const u32 place = buffer_place(shared_address(to) + n * ROWS_BYTES, j, (PING_PONG || GROUPS == 3) && !Config::EPILOGUE ? at : thread_lane);
              stmatrix(place, pack2(d[0], d[1], Half()), pack2(d[2], d[3], Half()), pack2(d[4], d[5], Half()), pack2(d[6], d[7], Half()));
            }
          }
        const int row = p.row + 64 * (first_rows() + i);
        auto store_rows = [&] {
          warp_barrier();
          const typename Result::Rows rows = result.rows(a, p, row + 16 * warp);
          const int chunks = WIDTH % C_COLUMNS ? min_of(8 * BATCH, (WIDTH - C_COLUMNS * first) / Chunk<TC>::N) : 8 * BATCH;  // of a row
#pragma unroll
          for (int q = 0; q < 4 * BATCH; q++) {
            if (WIDTH % C_COLUMNS && 2 * q >= chunks) break;
            const int index = q * WARP + thread_lane, r = index / chunks, chunk = index % chunks;
            const Chunk<TC>& x = *(const Chunk<TC>*)(to + chunk / 8 * ROWS_BYTES + chunk_place<Result::BOX_BYTES>(r, chunk));
            const int column = C_COLUMNS * first + Chunk<TC>::N * chunk;  // of the tile
            result.store(a, to_rows, rows, r, SUMS ? product_column(a, p, column) : result_column(p) + column, x);
          }
          warp_barrier();
        };
        if constexpr (Config::STORE == TMA) {
          if constexpr (DIVIDED_C)
            if (!of_group(p, row, p.column + C_COLUMNS * first, C_COLUMNS * BATCH)) store_rows();
          async_proxy_fence();
          warp_barrier();
          if (thread_lane == 0) barrier_arrive(out_ring.full(out_state));
        } else {
          store_rows();
        }
      }
  }

  // Of the ring, that the other consumer's tile t takes.
  KS_DEVICE int stages_of(int t) const {
    if constexpr (OF_LISTS) return t < scheduler.total ? slices_of(a, scheduler.tile(t, rank)) + a.source_stages() : 0;
    else return a.stages();
  }

  // Releases what comes for a tile whose rows it leaves out, in its turns.
  KS_DEVICE void leave_out(const TileCoord& p) {
    async_proxy_fence();  // what was written of the tile before is handed over before anything of this one
    if (PING_PONG) named_barrier_sync(TURN + group, CONSUMERS);
#pragma unroll 1
    for (int stages = slices_of(a, p) + (stores(p) ? a.source_stages() : 0); stages > 0; stages--, state.advance()) {
      ring.wait_full(state), named_barrier_sync(1 + group, 128);  // all four warps saw it full: no products keep them together
      if (Config::IN_TURNS) named_barrier_sync(TURN + group, CONSUMERS), named_barrier_arrive(TURN + 1 - group, CONSUMERS);
      release(state);
    }
    if (PING_PONG) named_barrier_arrive(TURN + 1 - group, CONSUMERS);
  }

  KS_DEVICE void run(int first, int step) {
    if ((Config::IN_TURNS || PING_PONG) && group == 1) named_barrier_arrive(TURN, CONSUMERS);
    if (PING_PONG && group == 1) state.advance(stages_of(first));
    const OwnTiles own = own_tiles(group, first, step);
#pragma unroll 1
    for (int t = own.first; t < scheduler.total; t += own.step) {
      const TileCoord p = scheduler.tile(t, rank);
      if (leaves_out(p, group)) {
        leave_out(p);
        if (PING_PONG) state.advance(stages_of(t + step));
        continue;
      }
      float bias_fragment[divide_up(BN, 128)] = {};
      if constexpr (Bias::THERE) {
        const auto* bias = Config::POINTERS ? listed((const Bias::type*)a.bias, p.matrix)
                                       : (const Bias::type*)a.bias + p.batch * a.bias_batch + p.head * a.bias_head;
#pragma unroll
        for (int n = 0; n < divide_up(BN, 128); n++) {
          const int column = product_column(a, p, thread() + 128 * n);
          if (column < a.N) bias_fragment[n] = to_sum(bias[result.weight_row(column)]);
        }
      }
      StoredRows c{(TC*)a.c, a.c_row, a.N / PER_COLUMN};
      if constexpr (OF_LISTS && Config::STORE == ROWS) c = rows_of_list(a, scheduler, p);
      else if (GROUPED_K) c.base += p.batch * a.c_batch;
      else if (GROUPED_COLUMNS) c.columns = p.end, c.first = p.begin;
      else if (Config::STORE == ROWS && !GROUPED_ROWS)
        c.base = Config::POINTERS ? listed((TC*)a.c, p.matrix) : c.base + p.batch * a.c_batch + p.head * a.c_head;
      float acc[MT][BN / 2], sums[MT][4];
      // Of the tiles that hold the same rows one sums them: heads may share a left factor, and so its sums.
      const bool summing = RowSums::THERE && p.column == 0 && (p.head == 0 || a.sums_head != 0);
      ScaleFragment scales;
      if constexpr (SCALES_BY_ROWS) scales = load_scales(p);
      RowFactors factors;
      if constexpr (Config::FACTORS) factors = load_factors(p);
      if constexpr (E4M3) mainloop_e4m3(acc, p);
      else mainloop(acc, sums, summing, p);
      if (summing) store_sums(sums, p);
      if constexpr (SPLIT > 1) {
        if (!SplitSums{storage, a, split_rank, group * 128 + thread()}.add_up(acc)) return;
      }
      if constexpr (TAIL)
        if (p.slices && !TailSums{a, number_of(scheduler), group, thread()}.add_up(acc, p.before)) continue;
      if constexpr (SCALES_BY_ROWS) multiply_by_scales(acc, scales);
      if (a.alpha != 1.f)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int e = 0; e < BN / 2; e++) acc[i][e] *= a.alpha;
      if constexpr (Config::FACTORS) multiply_by_factors(acc, factors);
      if constexpr (Bias::THERE) add_bias(acc, bias_fragment);
      if (!Config::HEADS && !Config::PAIRS && sizeof(TC) > 1 && a.beta != 0) add_source(acc, a.beta);
      if (Config::RESIDUAL) add_source(acc, 1.f);
      if constexpr (Config::ROTARY != 0)
        result.apply_rotary(acc, p, p.row + first_row(), 2 * (thread_lane & 3), a.M);
      if constexpr (Config::PREACTIVATION) {
        const EpilogueResults& sums = a.epilogue.results;
        TC* const base = (TC*)sums.preactivation;
        store<true>(acc, p, {Config::POINTERS ? listed(base, p.matrix) : base + p.batch * sums.batch + p.head * sums.head, sums.row, a.N}, [](int, int) {});
      }
      if constexpr (Config::EPILOGUE) {
        const int at = opaque(thread_lane);  // else its places are kept from tile to tile, and spill
        Expression expression(a, p, p.row + first_row(at), at);
        store<false>(acc, p, c, [&](int panel, int panels) { expression.apply(acc, a, storage.parts(group), group, warp, panel, panels); });
        if constexpr (Config::ADDS_UP) return JoinedParts{a, p, expression.block.matrix, group * 128 + thread()}.run();  // its only tile
      } else {
        store<false>(acc, p, c, [](int, int) {});
      }
      if (PING_PONG) state.advance(stages_of(t + step));  // the other's tile
    }
  }
};
