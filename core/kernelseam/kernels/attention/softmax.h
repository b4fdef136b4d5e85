// The softmax of every row of an attention's scores, between the two products that the unfused way leaves to a GEMM:
// from s = q·k it computes  p = FACTOR·2^(x − m)/l  with x the score in base 2 of what the query sees (scores.h), m the largest
// of the row and l = Σ 2^(x − m), sink included; and where it is asked for  lse = ln 2·(m + log2 l).
//
// One warp a row, a few neighbouring columns a lane. Two passes: the first keeps a maximum and a sum for each lane (online
// softmax, Milakov and Gimelshein 2018, arXiv:1805.02867) and joins them, the second computes the scores again and writes. A row
// that sees no key gets zeros, and an lse of −inf. Nothing is shared between warps. p may lie where s does. Their rows are `pitch`
// elements apart, a multiple of COLUMNS; of p, columns from S_k on are not read: any number may stand there.
#include "attention/scores.h"

typedef Config::T T;
constexpr int COLUMNS = Chunk<float>::N;
struct alignas(COLUMNS * sizeof(T)) Weights { T v[COLUMNS]; };

// What a sum of 2^(x − from) is to be multiplied with to be one of 2^(x − to); exactly 1 where nothing changes.
KS_DEVICE float fade(float from, float to) { return from == -infinity() ? 0.f : exp2_fast(from - to); }

KS_BODY(WARP * Config::WARPS, 1)
softmax_body(const float* products, T* weights, float* lse, const float* sinks, i64 lse_batch, i64 lse_head, int num_heads,
             int S_q, int S_k, int pitch, int total, ScoreArguments arguments) {
  const i64 index = (i64)block_index() * Config::WARPS + warp_index();
  if (index >= total) return;
  const int line = (int)index, i = line % S_q, head = line / S_q % num_heads, batch = line / S_q / num_heads;

  const Scores scores = arguments.of(batch, 0, S_q, S_k);

  const float* const from = products + index * pitch;
  T* const to = weights + index * pitch;
  const KeyRange any = scores.any(i, i);
  const int begin = any.begin / COLUMNS * COLUMNS, end = any.end;
  // Columns from S_k on have no products: the memory there may never have been written.
  auto read = [&](int j) {
    if (j + COLUMNS <= S_k) return *(const Chunk<float>*)(from + j);
    Chunk<float> s = {};
#pragma unroll
    for (int e = 0; e < COLUMNS; e++)
      if (j + e < S_k) s.v[e] = from[j + e];
    return s;
  };
  auto score = [&](const Chunk<float>& s, int j, int e) {
    return scores.visible(head, i, j + e) ? scores.apply(s.v[e], head, i, j + e) : -infinity();
  };

  const float sink = Config::SINKS ? in_base2(sinks[head]) : -infinity();
  float top = -infinity(), sum = 0.f;
  if (Config::SINKS && lane() == 0) top = sink, sum = sink == -infinity() ? 0.f : exp2_fast(sink - sink);  // of +inf NaN
#pragma unroll 1
  for (int j = begin + lane() * COLUMNS; j < end; j += WARP * COLUMNS) {
    const Chunk<float> s = read(j);
    float x[COLUMNS], now = top;
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) x[e] = score(s, j, e), now = maximum(now, x[e]);
    sum *= fade(top, now);
    const float base = now == -infinity() ? 0.f : now;
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) sum += exp2_fast(x[e] - base);
    top = now;
  }
#pragma unroll
  for (int m = 1; m < WARP; m *= 2) {
    const float other = shuffle_xor(top, m), share = shuffle_xor(sum, m), now = maximum(top, other);
    sum = sum * fade(top, now) + share * fade(other, now);
    top = now;
  }
  if (Config::LSE && lane() == 0)
    lse[batch * lse_batch + head * lse_head + i] = sum == 0.f ? -infinity() : 0.69314718056f * (top + log2_fast(sum));

  const float base = top == -infinity() ? 0.f : top, inverse = sum == 0.f ? 0.f : Config::FACTOR / sum;
#pragma unroll 1
  for (int j = lane() * COLUMNS; j < S_k; j += WARP * COLUMNS) {
    Weights p = {};
    if (j >= begin && j < end) {
      const Chunk<float> s = read(j);
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) p.v[e] = convert<T>(exp2_fast(score(s, j, e) - base) * inverse);
    }
    *(Weights*)(to + j) = p;
  }
}
