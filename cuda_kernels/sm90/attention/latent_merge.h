// Joins the parts of items that latent.h shared among blocks: with results o_n and log-sum-exps s_n in base 2,
//   s = log2 Σ 2^s_n,  o = Σ 2^(s_n − s)·o_n.
// A group of blocks shares at most two items with others, the one that it begins with and the one that it ends with; those who share
// an item join its rows in turns. A row is a warp's; where many share an item, and each joins few rows, it is all of a block's, which
// have every so many-th part each, and the first adds up what they have, in their order. What is not shared is done already. A part
// without a key has s_n = −inf and does not count. What the list says is found while blocks of latent.h still work.
//
// Shared memory: 8·DV·4 bytes, a row a warp.
#include "sm90/attention/latent_list.h"
#include "sm90/ptx.h"

typedef Config::T T;

constexpr int DV = Config::DV, WARPS = 8, THREADS = WARP * WARPS, EACH = DV / WARP / 4;  // fours of columns of a lane
constexpr int BLOCKS = Config::BLOCKS;  // of an end of a group's part, and a member
constexpr int FEW_PARTS = 4;            // of an item, up to which a warp joins a row: more warps would wait for each other
static_assert(DV % (4 * WARP) == 0 && WARPS * DV * 4 <= Config::SHARED_BYTES, "whole rows");

// An argument, passed whole.
struct Merged {
  const float *sums, *sums_lse;
  Matrices<T> out;
  RowValues<float> lse;
};

KS_DEVICE void add_four(float4& y, float weight, const float4& x) {
  y.x += weight * x.x, y.y += weight * x.y, y.z += weight * x.z, y.w += weight * x.w;
}

struct Joiner {
  const Merged& a;
  const List& list;
  float4 (*others)[DV / 4];  // [warp]

  // A row of the tile, by `sharing` warps, of parts that groups first to last left. Every warp must come; `there`: whether it has one.
  KS_DEVICE void join(const Piece& piece, int row, bool there, int first_group, int last_group, int sharing) const {
    const int warp = warp_index(), end_group = there ? last_group + 1 : first_group;
    auto lse_of = [&](int g) { return a.sums_lse[state_of(list, g, piece.member, first_group) * ROWS + row]; };
    float top = -infinity(), sum = 0.f;  // every lane has parts of its own
#pragma unroll 1
    for (int g = first_group + lane(); g < end_group; g += WARP) top = maximum(top, lse_of(g));
#pragma unroll
    for (int m = 1; m < WARP; m *= 2) top = maximum(top, shuffle_xor(top, m));
    const float base = top == -infinity() ? 0.f : top;
#pragma unroll 1
    for (int g = first_group + lane(); g < end_group; g += WARP) sum += exp2_fast(lse_of(g) - base);
#pragma unroll
    for (int m = 1; m < WARP; m *= 2) sum += shuffle_xor(sum, m);
    float4 y[EACH] = {};
#pragma unroll 2
    for (int g = first_group + warp % sharing; g < end_group; g += sharing) {
      const int state = state_of(list, g, piece.member, first_group) * ROWS + row;
      const float s = a.sums_lse[state], weight = exp2_fast(s - base);
      float4 part[EACH];  // loaded whatever s is, which then need not be waited for
#pragma unroll
      for (int i = 0; i < EACH; i++) part[i] = ((const float4*)(a.sums + (i64)state * DV))[i * WARP + lane()];
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (s != -infinity()) add_four(y[i], weight, part[i]);
    }
    if (sharing > 1) {
      block_barrier();  // the row before has been read
#pragma unroll
      for (int i = 0; i < EACH; i++) others[warp][i * WARP + lane()] = y[i];
      block_barrier();
      if (warp % sharing) return;
#pragma unroll 1
      for (int w = 1; w < sharing; w++)
#pragma unroll
        for (int i = 0; i < EACH; i++) add_four(y[i], 1.f, others[warp + w][i * WARP + lane()]);
    }
    if (!there) return;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const Rows rows(list, piece);
    const int query = rows.query(row), head = rows.head(row), q_first = piece.sequence.q_first;
    T* const to = a.out.at<Config::OUT_VIEW>(piece.entry, head, 0, q_first) + (i64)query * a.out.row;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      struct alignas(8) Four { T v[4]; } z{{convert<T>(y[i].x * inverse), convert<T>(y[i].y * inverse),
                                            convert<T>(y[i].z * inverse), convert<T>(y[i].w * inverse)}};
      ((Four*)to)[i * WARP + lane()] = z;
    }
    if (Config::LSE && lane() == 0)
      a.lse.base[piece.entry * a.lse.batch + head * a.lse.head + q_first + query] =
          sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));
  }
};

KS_KERNEL(THREADS, 3)
attention_latent_merge_sm90(KS_ARGUMENT Merged a, KS_ARGUMENT List list) {
  auto* const others = (float4 (*)[DV / 4])shared_memory<Config::SHARED_BYTES>();
  const int block = block_index() % BLOCKS, ends = block_index() / BLOCKS % 2, rest = block_index() / (2 * BLOCKS);
  const int group = list.group(rest);
  const Cut cut = cut_of(list);
  const bool used = group < cut.blocks && cut.total;
  Piece piece;
  piece.member = list.member(rest);
  int first_group = 0, last_group = 0;
  if (used) {
    const int place = ends ? cut.begin(group + 1) - 1 : cut.begin(group);
    const int first = place - find_item(list, place, piece);  // tile of the item
    first_group = cut.taker(first), last_group = cut.taker(first + piece.tiles - 1);
  }
  earlier_kernels_wait();
  const int parts = last_group - first_group + 1;
  // Of what it begins with, items that began before; of what it ends with, those that it began.
  if (!used || parts == 1 || (ends ? first_group != group : first_group >= group)) return;
  const int count = Rows(list, piece).count, sharing = parts > FEW_PARTS ? WARPS : 1, mine = WARPS / sharing;  // rows of the block at once
#pragma unroll 1
  for (int i = block * mine; group - first_group + i * parts < count; i += BLOCKS * mine) {
    const int row = group - first_group + (i + warp_index() / sharing) * parts;
    Joiner{a, list, others}.join(piece, row, row < count, first_group, last_group, sharing);
  }
}
