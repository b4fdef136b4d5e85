// What the roles of a block share: sizes, shared memory, rings, arguments.
#pragma once
#include "sm90/gemm/matrix.h"
#include "sm90/gemm/tiles.h"
#include "sm90/pipeline.h"
#include "sm90/wgmma.h"

typedef optional<Config::BIAS> Bias;

constexpr int PRODUCTS = Config::PRODUCTS, PARTS = PRODUCTS == 3 ? 2 : 1, GROUPS = Config::GROUPS, STAGES = Config::STAGES;
constexpr int LEFT = Config::SWAP_AB ? Config::BN : Config::BM, RIGHT = Config::SWAP_AB ? Config::BM : Config::BN, BK = 32;
constexpr int CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128 * Config::LOADERS;
constexpr int SPLITTERS = 4 * Config::LOADERS - 1;  // warps
static_assert(LEFT == 64 * GROUPS && RIGHT % 64 == 0, "tiles are of 64 rows a consumer, and panels of 64 columns");
static_assert(!Config::SWAP_AB || Config::LEFT_TRANSPOSED, "B that lies along k is the right factor");

constexpr int LEFT_BYTES = LEFT * 128, RIGHT_BYTES = RIGHT * 128, STAGE_BYTES = LEFT_BYTES + RIGHT_BYTES;
// A left factor that lies along its rows comes in panels of 32 rows, 128 bytes for each of a slice's 32 k.
constexpr int PANEL_ROWS = 32, PANEL_BYTES = BK * 128;

struct alignas(1024) SharedStorage {
  char left[STAGES][LEFT_BYTES], right[STAGES][RIGHT_BYTES];
  char small[PARTS == 2 ? STAGES : 1][PARTS == 2 ? RIGHT_BYTES : 16];  // second parts of the right factor
  u64 ring[2 * STAGES], split[STAGES];
};
static_assert(sizeof(SharedStorage) <= Config::SHARED_BYTES, "the tiles fit");

struct Arguments {
  const void *a, *b, *bias, *residual, *origin;
  void* c;
  i64 c_batch, c_head, bias_batch, bias_head, residual_batch, residual_head;
  int c_row, residual_row, M, N, slices;  // of K, 32 each
  int a_head, a_batch, b_head, b_batch;   // 0 where all heads, or batches, share one matrix
  float alpha, beta;
};

// The nearest TF32, ties away from 0.
KS_DEVICE u32 to_tf32(float x) {
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
// x = large + small + at most 2⁻²² of it, both of TF32. The units cut off what lies behind the 10th bit, so half of that bit is added
// to round; of an infinity nothing is left, and what small is then is nothing that is finite and anything but 0, or is left out.
KS_DEVICE void split_tf32(float x, u32& large, u32& small) {
  large = to_tf32(x);
  small = __float_as_uint(x - __uint_as_float(large)) + 0x1000;
}
