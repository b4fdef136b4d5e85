// The gradient of a bias, for Hopper: after attention_backward_rows_sm90, beside the other gradients.
//
// With p = 2^(x − lse₂) and x the scores in base 2 (scores.h):  dx = p·(dout·vᵀ − delta),  summed over the entries of the batch and the heads
// that share an element. Scores and dp are computed once more, two products of the seven in all; but every sum is made in registers by the
// one block that owns the element, entry after entry and head after head: nothing is added in memory, and sums have one order.
//
// A block is one producer warpgroup and two consumers of 64 queries each. It owns tiles of ROWS queries × KEYS keys one after the other and
// walks over all STEPS of a tile: pairs of an entry and a head, of which q and k, then dout and v come by TMA through one ring. Queries are
// rows, as in the forward, whose Score policy computes scores. A tile of which an entry's mask hides all is passed over; zeros are written.
// The blocks of a cluster own neighbouring queries, and each loads its part of the keys and values for all.
//
// Bytes from L2 for a step of D = 128: 128 KB for 8.4 MFLOP, 96 in a cluster of two. Shared memory: STAGES · 256 · columns · 2 bytes, and
// the bias of a tile. Registers of a consumer's thread: 64 each of s, dp and sums, and about 30.
#include "attention/sequences.h"
#include "sm90/attention/score.h"
#include "sm90/pipeline.h"

typedef Config::T T;
typedef Config::TO Out;
constexpr int DQK = Config::DQK, DV = Config::DV, QK_COLUMNS = Config::QK_COLUMNS, V_COLUMNS = Config::V_COLUMNS, STAGES = Config::STAGES;
constexpr int ROWS = 128, KEYS = 128, CLUSTER = Config::CLUSTER, PART = KEYS / CLUSTER, GROUPS = 2, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128;
constexpr int PANEL_BYTES = 128 * 128, STAGE_BYTES = 2 * tile_bytes<128, max_of(QK_COLUMNS, V_COLUMNS)>;
typedef TileScore<KEYS> Score;
static_assert(Score::ANY, "a bias is added to scores");

struct alignas(1024) ScoreStorage {
  char stages[STAGES][STAGE_BYTES];
  char bias[CONSUMERS / WARP * Score::BiasRows::BYTES + 16];
  u64 ring[2 * STAGES];
};
static_assert(sizeof(ScoreStorage) <= Config::SHARED_BYTES, "the tiles fit");

// Tiles of a launch, one for a cluster, computed on the host: of `kept_heads` heads of each entry that has elements of its own; a tile's steps walk over
// `entries` × `heads` that share them. An argument, passed whole.
struct ScoreTiles {
  int q_tiles, key_tiles, total, kept_heads, entries, heads, head_group, num_heads, padded_rows;
  // Where the row values of a head of an entry begin: in blocks of STEP rows (backward/sums.h).
  KS_DEVICE i64 values(int entry, int head, const Sequence& s) const {
    constexpr int STEP = Config::STEP;
    if (Config::Q_VIEW == PACKED) return (i64)(s.q_first / STEP + entry) * STEP + (i64)head * padded_rows;
    return (i64)(entry * num_heads + head) * padded_rows;
  }
};

struct ScoreTile {
  int entry, head, row, key;
  KS_DEVICE ScoreTile(const ScoreTiles& count, int t) {  // its first row is the cluster's
    const int q_tile = t / count.key_tiles, outer = q_tile / count.q_tiles;
    key = (t - q_tile * count.key_tiles) * KEYS, row = (q_tile - outer * count.q_tiles) * (ROWS * CLUSTER);
    entry = outer / count.kept_heads, head = outer - entry * count.kept_heads;
  }
};

// An entry and a head of a tile's: one after the other.
struct ScoreStep {
  int entry, head;
  KS_DEVICE bool there(const ScoreTiles& count, const ScoreTile& tile) const { return entry < tile.entry + count.entries; }
  KS_DEVICE void advance(const ScoreTiles& count, const ScoreTile& tile) {
    if (++head == tile.head + count.heads) head = tile.head, entry++;
  }
  // Whether some query of the cluster's sees a key of the tile.
  KS_DEVICE bool sees(const ScoreTile& tile, const Sequence& s, const ScoreArguments& score) const {
    const KeyRange any = score.of(entry, s.S_q, s.S_k).any(tile.row, min_of(tile.row + ROWS * CLUSTER, s.S_q) - 1);
    return tile.row < s.S_q && any.begin < min_of(tile.key + KEYS, any.end) && any.end > tile.key;
  }
};

struct ScoreOperands {
  const float *lse, *delta;  // as attention_backward_rows_sm90 writes them: −lse in base 2, −inf where there is no such query
};

KS_DEVICE void store_pair(float* to, float x, float y) { *(float2*)to = float2{x, y}; }
template<class Half> KS_DEVICE void store_pair(Half* to, float x, float y) { *(u32*)to = pack2(x, y, Half()); }

struct ScoreConsumer {
  ScoreStorage& storage;
  const Ring<STAGES>& ring;
  const ScoreOperands& a;
  const Planes<Out>& dbias;
  const ScoreArguments& score;
  const Sequences& sequences;
  const ScoreTiles& count;
  int rank, group, warp, thread_lane;

  // What of a mask in memory is the thread's (tiles.h: MaskRow).
  KS_DEVICE void see(Score::Rows& rows, const Scores& own, int row, int key) const {
    if constexpr (Config::MASK) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 bits = 0;
#pragma unroll 8
        for (int i = 0; i < KEYS / 4; i++) {
          const int j = key + i / 2 * 8 + i % 2;
          bits |= (u32)(own.mask.at(0, inside(row + 8 * r, own.S_q), inside(j, own.S_k)) != 0) << i;
        }
        rows.mask[r] = bits;
      }
    }
  }

  KS_DEVICE void store(const float (&sums)[KEYS / 2], const ScoreTile& tile, int row, int key) const {
    Out* const to = const_cast<Out*>(dbias.base) + tile.entry * dbias.batch + tile.head * dbias.head;
    const bool pairs = dbias.column == 1 && (((u64)to | (u64)dbias.row * sizeof(Out)) & (2 * sizeof(Out) - 1)) == 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row + 8 * r >= sequences.S_q) continue;
      Out* const line = to + (row + 8 * r) * dbias.row;
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
        const int j = key + i * 8;
        const float x = sums[4 * i + 2 * r], y = sums[4 * i + 2 * r + 1];
        if (pairs && j + 1 < sequences.S_k) {
          store_pair(line + j, x, y);
        } else {
          if (j < sequences.S_k) line[j * dbias.column] = convert<Out>(x);
          if (j + 1 < sequences.S_k) line[(j + 1) * dbias.column] = convert<Out>(y);
        }
      }
    }
  }

  // Products of this group's rows of a stage with its keys' rows, begun; and finished, when the stage is handed back.
  template<int COLUMNS> KS_DEVICE void multiply(float (&x)[KEYS / 2], u32 left, u32 right, const PipelineState<STAGES>& state) const {
    ring.wait_full(state);
    wgmma_fence();
    multiply_ss<T, KEYS, COLUMNS / 16, PANEL_BYTES, PANEL_BYTES>(x, whole(advanced(left, state.stage * STAGE_BYTES)),
                                                                 whole(advanced(right, state.stage * STAGE_BYTES)), false);
    wgmma_commit();
  }
  KS_DEVICE void finish(float (&x)[KEYS / 2], PipelineState<STAGES>& state) const {
    wgmma_wait<0>();
    pin(x);
    if (thread_lane == 0) {
      barrier_arrive(ring.empty(state));
      if (CLUSTER == 2) barrier_arrive_at(ring.empty(state), rank ^ 1);
    }
    state.advance();
  }

  KS_DEVICE void run() const {
    PipelineState<STAGES> state{0, 0};
    const SmallCap none{};
    const u32 left = descriptor_k_major(shared_address(storage.stages) + group * 64 * 128);
    const u32 right = descriptor_k_major(shared_address(storage.stages) + STAGE_BYTES / 2);
    const u32 bias = shared_address(storage.bias) + (group * 4 + warp) * Score::BiasRows::BYTES;
#pragma unroll 1
    for (int t = block_index() / CLUSTER; t < count.total; t += gridDim.x / CLUSTER) {
      const ScoreTile tile(count, t);
      const int first_row = tile.row + rank * ROWS + group * 64 + warp * 16 + thread_lane / 4, from = tile.key + thread_lane % 4 * 2;
      float sums[KEYS / 2];
#pragma unroll
      for (int i = 0; i < KEYS / 2; i++) sums[i] = 0.f;
      pin(sums);
      async_copies_wait(), warp_barrier();  // of a tile of which nothing was seen
      const Plane<Score::Bias> plane = score.of(tile.entry, tile.head, sequences.S_q, sequences.S_k).bias;
      Score::BiasRows(score.bias, plane, first_row - thread_lane / 4, bias, thread_lane)
          .copy(score.bias, plane, first_row - thread_lane / 4, sequences.S_q - (first_row - thread_lane / 4), tile.key, sequences.S_k, thread_lane);
#pragma unroll 1
      for (ScoreStep step{tile.entry, tile.head}; step.there(count, tile); step.advance(count, tile)) {
        const Sequence sequence = sequences.at(step.entry);
        if (!step.sees(tile, sequence, score)) continue;
        const int row = opaque(first_row);  // else distances of all elements are computed ahead of the steps, and spilled
        const int S_q = sequence.S_q, S_k = sequence.S_k;
        const Scores own = score.of(step.entry, step.head, S_q, S_k);
        const Score policy{own, none, score};
        Score::Rows rows;
        policy.rows(rows, own, row, bias, thread_lane);
        float s[KEYS / 2], dp[KEYS / 2], log[2], delta[2];
        const i64 first = count.values(step.entry, step.head, sequence);
        const bool there[2] = {row < S_q, row + 8 < S_q};
        multiply<QK_COLUMNS>(s, left, right, state);
#pragma unroll
        for (int r = 0; r < 2; r++) log[r] = there[r] ? a.lse[first + row + 8 * r] : -infinity();
        see(rows, own, row, from);
        const auto ahead = policy.template ahead<true>(rows, from);
        finish(s, state);
        const Score::Factor factor = policy.factor(1.f);
        policy.template begin<true>(s, factor, rows, ahead, from);
        policy.hide(s, own, inside(row, S_q), inside(row + 8, S_q), from);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
          s[i] = exp2_fast(s[i] + log[i / 2 % 2]);
          if (Config::Q_VIEW == PACKED && !there[i / 2 % 2]) s[i] = 0.f;  // the next sequence's rows may be NaN
        }
        pin(s);
        multiply<V_COLUMNS>(dp, left, right, state);
#pragma unroll
        for (int r = 0; r < 2; r++) delta[r] = there[r] ? a.delta[first + row + 8 * r] : 0.f;
        finish(dp, state);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) sums[i] += s[i] == 0.f ? 0.f : s[i] * (dp[i] - delta[i / 2 % 2]);
      }
      store(sums, tile, first_row, from);
    }
  }
};

struct ScoreProducer {
  ScoreStorage& storage;
  const Ring<STAGES>& ring;
  int rank;
  PipelineState<STAGES> state{0, 1};

  // q and k of a step, or dout and v.
  template<int COLUMNS>
  KS_DEVICE void load(const TensorMap& of_queries, const TensorMap& of_keys, const ScoreTile& tile, const ScoreStep& step, const Sequence& s, int kv_head) {
    ring.wait_empty(state);
    const u32 full = ring.full(state), to = shared_address(storage.stages[state.stage]);
    barrier_arrive_expect_tx(full, 2 * tile_bytes<128, COLUMNS>);
    const int entry = Config::Q_VIEW == PACKED ? 0 : step.entry;
    tile_load<ROWS, COLUMNS>(to, of_queries, full, s.q_first + tile.row + rank * ROWS, step.head, entry);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 64) {
      const u32 part = to + STAGE_BYTES / 2 + c / 64 * PANEL_BYTES + rank * PART * 128;
      const int key = s.k_first + tile.key + rank * PART;
      if (CLUSTER == 1) tma_load(part, of_keys, full, c, key, kv_head, entry);
      else tma_load_multicast(part, of_keys, full, c, key, kv_head, entry, (1 << CLUSTER) - 1);
    }
    state.advance();
  }
};

static_assert(registers_suffice(Config::PRODUCER_REGISTERS + GROUPS * Config::CONSUMER_REGISTERS, THREADS));

KS_KERNEL(THREADS, 1)
attention_backward_scores_sm90(KS_ARGUMENT TensorMap q_map, KS_ARGUMENT TensorMap dout_map, KS_ARGUMENT TensorMap k_map,
                               KS_ARGUMENT TensorMap v_map, KS_ARGUMENT ScoreOperands operands, KS_ARGUMENT Planes<Out> dbias,
                               KS_ARGUMENT Sequences sequences, KS_ARGUMENT ScoreTiles count, KS_ARGUMENT ScoreArguments score) {
  extern __shared__ __align__(1024) char memory[];
  ScoreStorage& storage = *(ScoreStorage*)memory;
  const Ring<STAGES> ring{shared_address(storage.ring)};
  const int rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (thread_index() == 0) {
    ring.init(CONSUMERS / WARP * CLUSTER);
    barrier_init_fence();
  }
  if (CLUSTER == 1) block_barrier();
  else cluster_barrier();
  earlier_kernels_wait();
  next_kernel_launch();
  const int group = warp_index() / 4;
  if (group < GROUPS) {
    registers_alloc<Config::CONSUMER_REGISTERS>();
    ScoreConsumer{storage, ring, operands, dbias, score, sequences, count, rank, group, warp_index() % 4, lane()}.run();
  } else {
    registers_dealloc<Config::PRODUCER_REGISTERS>();
    ScoreProducer producer{storage, ring, rank};
    if (thread_index() == CONSUMERS)
#pragma unroll 1
      for (int t = block_index() / CLUSTER; t < count.total; t += gridDim.x / CLUSTER) {
        const ScoreTile tile(count, t);
#pragma unroll 1
        for (ScoreStep step{tile.entry, tile.head}; step.there(count, tile); step.advance(count, tile)) {
          const Sequence sequence = sequences.at(step.entry);
          if (!step.sees(tile, sequence, score)) continue;
          const int kv_head = step.head / count.head_group;
          producer.load<QK_COLUMNS>(q_map, k_map, tile, step, sequence, kv_head);
          producer.load<V_COLUMNS>(dout_map, v_map, tile, step, sequence, kv_head);
        }
      }
  }
  if (CLUSTER > 1) cluster_barrier();  // no block leaves while the other may write to it
}
