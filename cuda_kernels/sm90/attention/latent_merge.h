// Joins the parts of items that latent.h shared among blocks: with results o_n and log-sum-exps s_n in base 2,
//   s = log2 Σ 2^s_n,  o = Σ 2^(s_n − s)·o_n.
// `sharing` warps have a row, and every so many-th part of it each; the first adds up what they have, in their order. What is not
// shared is done already. A part without a key has s_n = −inf and is not read.
//
// Shared memory: 8·DV·4 bytes, a row a warp.
#include "sm90/attention/latent_list.h"
#include "sm90/ptx.h"

typedef Config::T T;

constexpr int DV = Config::DV, WARPS = 8, THREADS = WARP * WARPS, EACH = DV / WARP / 4;  // fours of columns of a lane
static_assert(ROWS % WARPS == 0 && DV % (4 * WARP) == 0 && WARPS * DV * 4 <= Config::SHARED_BYTES, "whole rows");

// An argument, passed whole.
struct Merged {
  const float *sums, *sums_lse;
  Matrices<T> out;
  RowValues<float> lse;
  int sharing;  // warps of a row
};

KS_DEVICE void add_four(float4& y, float weight, const float4& x) {
  y.x += weight * x.x, y.y += weight * x.y, y.z += weight * x.z, y.w += weight * x.w;
}

KS_KERNEL(THREADS, 1)
attention_latent_merge_sm90(KS_ARGUMENT Merged a, KS_ARGUMENT List list) {
  auto* const others = (float4 (*)[DV / 4])shared_memory<Config::SHARED_BYTES>();  // [warp]
  earlier_kernels_wait();
  const int warp = warp_index(), rows = WARPS / a.sharing, blocks = ROWS / rows;  // rows of a block, blocks of a tile
  const int number = block_index() / blocks, row = (block_index() - number * blocks) * rows + warp / a.sharing;
  const int items = list.items_of_entry(), entry = number / (items * list.together), in_entry = number - entry * items * list.together;
  const int item = in_entry / list.together, member = in_entry - item * list.together;
  const Rows rows_of(list, item, member);
  if (rows_of.head + row - warp / a.sharing >= list.head_group) return;  // so are all of the block's
  const Cut cut(list);
  const int tiles = list.tiles(entry), first = list.places_before(entry) + item * (tiles + ITEM_COST) + ITEM_COST;
  const int first_group = cut.taker(first), last_group = cut.taker(first + tiles - 1);
  if (first_group == last_group) return;
  const int head = rows_of.head + row;
  const int end_group = head < list.head_group ? last_group + 1 : first_group;  // nobody wrote rows beyond the heads

  float top = -infinity(), sum = 0.f;
  bool lost = false;  // a NaN, which a maximum would pass over
#pragma unroll 8  // so many loads in flight
  for (int g = first_group; g < end_group; g++) {
    const float s = a.sums_lse[state_of(list, g, member, first_group) * ROWS + row];
    top = maximum(top, s), lost = lost || s != s;
  }
  const float base = top == -infinity() ? 0.f : top;
#pragma unroll 8
  for (int g = first_group; g < end_group; g++) sum += exp2_fast(a.sums_lse[state_of(list, g, member, first_group) * ROWS + row] - base);
  float4 y[EACH] = {};
#pragma unroll 4
  for (int g = first_group + warp % a.sharing; g < end_group; g += a.sharing) {
    const int state = state_of(list, g, member, first_group) * ROWS + row;
    const float s = a.sums_lse[state];
    if (s == -infinity()) continue;
    const float weight = exp2_fast(s - base);
#pragma unroll
    for (int i = 0; i < EACH; i++) add_four(y[i], weight, ((const float4*)(a.sums + (i64)state * DV))[i * WARP + lane()]);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) others[warp][i * WARP + lane()] = y[i];
  block_barrier();
  if (warp % a.sharing || head >= list.head_group) return;
#pragma unroll 1
  for (int w = 1; w < a.sharing; w++)
#pragma unroll
    for (int i = 0; i < EACH; i++) add_four(y[i], 1.f, others[warp + w][i * WARP + lane()]);

  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  T* const to = a.out.base + entry * a.out.batch + (rows_of.kv_head * list.head_group + head) * a.out.head + (i64)rows_of.query * a.out.row;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    struct alignas(8) Four { T v[4]; } z{{convert<T>(y[i].x * inverse), convert<T>(y[i].y * inverse),
                                          convert<T>(y[i].z * inverse), convert<T>(y[i].w * inverse)}};
    ((Four*)to)[i * WARP + lane()] = z;
  }
  if (Config::LSE && lane() == 0)
    a.lse.base[entry * a.lse.batch + (rows_of.kv_head * list.head_group + head) * a.lse.head + rows_of.query] =
        sum == 0.f ? -infinity() : lost ? sum : 0.69314718056f * (top + log2_fast(sum));
}
