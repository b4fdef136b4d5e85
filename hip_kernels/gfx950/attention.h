// Fused attention forward of CDNA 4 (gfx950): out = softmax(scale·q·kᵀ) · v and optionally the log-sum-exp of every row, for
// head dims of 64 and 128 in half precision; keys hidden by their number, a causal mask or a window.
//
// Algorithm (FlashAttention-2, Dao 2023, arXiv:2307.08691): a block owns BM = 256 queries of a head, 32 a wave, and walks
// over the keys that any of them sees in tiles of BN. Products are of 32×32×16 and transposed, S = K·Qᵀ and O = Vᵀ·Pᵀ: so a lane has one query,
// half of the keys (lanes 32 apart share a query), and what it has of S is, rounded, its part of the factor P.
//
// The 8 waves are two of a SIMD, and take turns: in a phase of products a wave makes the scores of tile i + 1 and adds tile i
// to O, in a phase of vector work it makes P of the scores; waves 4…7 are a phase behind. A barrier ends each phase. O and the
// sums are rescaled only where a score exceeds its row's reference by more than REFERENCE_RISE in base 2 (forward.h).
//
// Copies go straight to LDS, 16 bytes a lane, into rings of STAGES = 3 tiles each of K and V. In phase i of products the copies
// of K's tile i + 3 and V's tile i + 2 begin, whose places everyone has read (the phase before last); they are complete at the
// end of the vector phase that follows, two barriers before anyone reads them.
//
// LDS: rows as in memory, 1024 bytes a copy of a wave; the chunks of 16 bytes of a row are permuted, by the lanes' choice of
// what they load: K's such that the 16 lanes of a phase of a read of 128 bits meet each of 64 banks once, V's such that the 32
// lanes of a phase of a transposing read of 64 bits do. That read gives lane 16·g + i the elements of column i of 4 rows of
// 16 elements, whose 8-byte pieces lanes 16·g … 16·g + 15 address in order. The queries are loaded in whole rows, and reach their
// lanes through LDS that no tile has yet, permuted as K.
//
// Keys and values in pages: a wave's part of a tile, PART rows, lies in one page, whose number is read from the block table a tile
// before it is needed.
//
// What a mask hides cannot reach a row, even where V holds NaN or inf there: a tile that is not whole for a wave is searched
// for such values, and where it has some they are taken out of the factor and given to the rows that see them.
//
// LDS: 6·BN·D·2 bytes, 96 KiB; before it from V's second tile on the waves' queries, D·512 bytes; afterwards their parts of the
// output. Registers of a lane (256, of two waves a SIMD): D/2 of O,
// D/4 of the queries, BN/2 of S, BN/4 of P.
#include "gfx950/rows.h"

constexpr int Q_RING = V_RING + TILE;  // the waves' queries, before the first phase
static_assert(2 * STAGES * TILE <= Config::SHARED_BYTES && Q_RING + BM * ROW <= Config::SHARED_BYTES, "the tiles fit");
constexpr int KEY_BLOCKS = BN / 32, STEPS_D = D / 16, BLOCKS_D = D / 32;

typedef float Block __attribute__((ext_vector_type(16)));  // a lane's part of 32×32 sums
typedef float FloatPair __attribute__((ext_vector_type(2)));
typedef unsigned Part __attribute__((ext_vector_type(2)));

// `first` adds to the constant 0, of which the compiler would make 16 registers ahead of a loop and copy them at each use. No
// wait is due around it: what it reads came from LDS, and the next product may follow at once with its sums.
#define KS_FIRST_PRODUCT(type)                                                                              \
  static KS_DEVICE Block first(Fragment a, Fragment b) {                                                    \
    Block c;                                                                                                \
    asm("v_mfma_f32_32x32x16_" type " %0, %1, %2, 0" : "=&v"(c) : "v"(a), "v"(b));                          \
    return c;                                                                                               \
  }
template<class X> struct Product;
template<> struct Product<f16> {
  typedef _Float16 Eight __attribute__((ext_vector_type(8)));
  static KS_DEVICE Block run(Fragment a, Fragment b, Block c) {
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(Eight, a), __builtin_bit_cast(Eight, b), c, 0, 0, 0);
  }
  KS_FIRST_PRODUCT("f16")
};
template<> struct Product<bf16> {
  typedef __bf16 Eight __attribute__((ext_vector_type(8)));
  static KS_DEVICE Block run(Fragment a, Fragment b, Block c) {
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(Eight, a), __builtin_bit_cast(Eight, b), c, 0, 0, 0);
  }
  KS_FIRST_PRODUCT("bf16")
};

// Addresses in LDS, of 32 bits.
template<class X> KS_DEVICE X read_shared(unsigned at) { return *(const KS_LOCAL X*)(size_t)at; }
template<class X> KS_DEVICE void write_shared(unsigned at, X x) { *(KS_LOCAL X*)(size_t)at = x; }
KS_DEVICE Part read_transposed(unsigned at) {
  typedef short Four __attribute__((ext_vector_type(4)));
  return __builtin_bit_cast(Part, __builtin_amdgcn_ds_read_tr16_b64_v4i16((KS_LOCAL Four*)(size_t)at));
}
KS_DEVICE void copies_arrive() {
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
  asm volatile("" : : : "memory");
}
KS_DEVICE void end_phase() {
  __builtin_amdgcn_sched_barrier(0);
  block_barrier();
  __builtin_amdgcn_sched_barrier(0);
}
// What both lanes of a query have, the larger or the sum. (Of the builtin, given one value twice, hiprtc 6.4 takes both
// results to be the same.) The instruction may not read what the one before wrote.
KS_DEVICE float both_max(float x) {
  float y = x;
  asm volatile("s_nop 1\n\tv_permlane32_swap_b32 %0, %1\n\tv_max_f32 %0, %0, %1" : "+v"(x), "+v"(y));
  return x;
}
KS_DEVICE float both_sum(float x) {
  float y = x;
  asm volatile("s_nop 1\n\tv_permlane32_swap_b32 %0, %1\n\tv_add_f32 %0, %0, %1" : "+v"(x), "+v"(y));
  return x;
}

// A number of 16 bits that is inf or NaN has all bits of its exponent.
constexpr unsigned EXPONENT = Same<T, f16>::value ? 0x7c00 : 0x7f80;
KS_DEVICE unsigned finite_halves(unsigned x) {
  const unsigned lo = (x & EXPONENT) == EXPONENT ? 0 : 0xffff, hi = (x >> 16 & EXPONENT) == EXPONENT ? 0 : 0xffff0000;
  return x & (lo | hi);
}

struct Walk {
  Fragment q[STEPS_D];
  Block s[KEY_BLOCKS], o[BLOCKS_D];
  Fragment p[KEY_BLOCKS][2];
  unsigned k_at, v_at;  // in LDS, of the first parts
  float base, limit, c;  // the reference, times the factor c; the largest product that leaves it
  FloatPair l;

  KS_DEVICE void begin(unsigned ring, float factor) {
    const int n = lane() % 32, h = lane() / 32, i = lane() % 16, g = lane() / 16 % 2;
    // Permutations are by exclusive or, and the ring begins at a multiple of a row: so are the places of other parts.
    k_at = ring + n * ROW + (h ^ k_permutation(n)) * 16;
    const int row = 4 * h + i / 4;
    v_at = ring + V_RING + row * ROW + ((2 * g + i % 4 / 2) ^ v_permutation(row)) * 16 + i % 2 * 8;
#pragma unroll
    for (int d = 0; d < BLOCKS_D; d++) o[d] = 0.f;
    base = 0.f, limit = -infinity(), c = factor, l = 0.f;
  }
  // Steps of the products: of the scores, one block after the other with each part of the queries; of the values, each
  // block of columns with each part of the weights.
  static constexpr int SCORES = KEY_BLOCKS * STEPS_D, VALUES = KEY_BLOCKS * 2 * BLOCKS_D;
  template<int N> KS_DEVICE static Fragment key_factor(unsigned at, unsigned stage) {
    return read_shared<Fragment>((at ^ N / KEY_BLOCKS * 32) + stage + N % KEY_BLOCKS * 32 * ROW);
  }
  template<int N> KS_DEVICE void add_score(Fragment x) {
    constexpr int b = N % KEY_BLOCKS, d = N / KEY_BLOCKS;
    s[b] = d == 0 ? Product<T>::first(x, q[d]) : Product<T>::run(x, q[d], s[b]);
  }
  // A lane's sums of a block are of keys 8·a + 4·h + 0…3, a = 0…3: those of a = 2·t, 2·t + 1 are the factor's of step t.
  template<int N> KS_DEVICE static Fragment value_factor(unsigned at, unsigned stage) {
    const unsigned place = (at ^ N % BLOCKS_D * 64) + stage + N / BLOCKS_D * 16 * ROW;
    const Part first = read_transposed(place), second = read_transposed(place + 8 * ROW);
    return {first.x, first.y, second.x, second.y};
  }
  template<int N> KS_DEVICE void add_value(Fragment x) {
    constexpr int d = N % BLOCKS_D, t = N / BLOCKS_D % 2, b = N / BLOCKS_D / 2;
    o[d] = Product<T>::run(x, p[b][t], o[d]);
  }
  // Products of the scores of one tile and the values of another. Factors are read a group ahead, and waited for once a group.
  template<bool WITH_SCORES, bool WITH_VALUES> KS_DEVICE void products(unsigned k_stage, unsigned v_stage) {
    constexpr int FIRST = WITH_SCORES ? 0 : SCORES, END = WITH_VALUES ? SCORES + VALUES : SCORES, GROUP = D == 128 ? 2 : 4;
    // Places of 128 columns are made anew: there are no registers to keep them in.
    const unsigned k = D == 128 ? opaque(k_at) : k_at, v = D == 128 ? opaque(v_at) : v_at;
    Fragment x[2][GROUP];
    unrolled<(END - FIRST) / GROUP + 1>([&](auto g) {
      constexpr int N = FIRST + g * GROUP, READS = N >= END ? 0 : N < SCORES ? GROUP : 2 * GROUP;
      if constexpr (N < END)
        unrolled<GROUP>([&](auto i) {
          if constexpr (N < SCORES) x[g % 2][i] = key_factor<N + i>(k, k_stage);
          else x[g % 2][i] = value_factor<N - SCORES + i>(v, v_stage);
        });
      __builtin_amdgcn_sched_barrier(0);
      if constexpr (N > FIRST) {
        __builtin_amdgcn_s_waitcnt(0xc07f | READS << 8);  // lgkmcnt
        __builtin_amdgcn_sched_barrier(0);
        unrolled<GROUP>([&](auto i) {
          constexpr int BEFORE = N - GROUP + i;
          if constexpr (BEFORE < SCORES) add_score<BEFORE>(x[(g + 1) % 2][i]);
          else add_value<BEFORE - SCORES>(x[(g + 1) % 2][i]);
        });
        __builtin_amdgcn_sched_barrier(0);
      }
    });
  }
  KS_DEVICE void weights() {
    float top = s[0][0], other = s[0][1];
#pragma unroll
    for (int e = 2; e < 16 * KEY_BLOCKS; e += 2) {
      float& largest = e % 4 ? top : other;
      largest = maximum(maximum(largest, s[e / 16][e % 16]), s[e / 16][e % 16 + 1]);
    }
    const float largest = both_max(maximum(top, other));
    const bool moves = largest > limit;
    if (any_lane(moves)) {
      const float moved = moves ? largest * c : base;
      // Exactly 1 where the reference stays.
      const float fade = limit == -infinity() ? 0.f : exp2_fast(base - moved);
      base = moved, limit = moves ? largest + REFERENCE_RISE * __builtin_amdgcn_rcpf(c) : limit;
      l *= fade;
#pragma unroll
      for (int d = 0; d < BLOCKS_D; d++) o[d] *= fade;
    }
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
      for (int e = 0; e < 16; e += 2) {
        const FloatPair x = __builtin_elementwise_fma(FloatPair{s[b][e], s[b][e + 1]}, FloatPair{c, c}, FloatPair{-base, -base});
        const FloatPair y = {exp2_fast(x.x), exp2_fast(x.y)};
        l += y;
        p[b][e / 8][e % 8 / 2] = pack<T>(y.x, y.y);
      }
  }
  template<class Sees> KS_DEVICE void hide(Sees sees) {
#pragma unroll
    for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
      for (int e = 0; e < 16; e++) s[b][e] = sees(b * 32 + opaque(lane() / 32 * 4) + e / 4 * 8 + e % 4) ? s[b][e] : -infinity();
  }
  // Products of the values of a tile of which only `keys` are there, and some may be hidden.
  template<class Sees> KS_DEVICE void add_values_hidden(unsigned tile, unsigned stage, int keys, Sees sees) {
    bool found = false;
#pragma unroll 1
    for (int i = lane() * 16; i < TILE; i += WARP * 16) {
      const Fragment x = read_shared<Fragment>(tile + i);
#pragma unroll
      for (int e = 0; e < 4; e++) found |= finite_halves(x[e]) != x[e];
    }
    if (!any_lane(found)) return products<false, true>(0, stage);
    unrolled<VALUES>([&](auto n) {
      const Fragment x = value_factor<n>(v_at, stage);
      add_value<n>(Fragment{finite_halves(x.x), finite_halves(x.y), finite_halves(x.z), finite_halves(x.w)});
    });
#pragma unroll 1
    for (int j = 0; j < keys; j++) {
      const bool seen = sees(j);
#pragma unroll
      for (int d = 0; d < BLOCKS_D; d++)
#pragma unroll
        for (int a = 0; a < 4; a++) {
          const unsigned at = tile + j * ROW + ((4 * d + a) ^ v_permutation(j)) * 16 + lane() / 32 * 8;
          typedef T Four __attribute__((ext_vector_type(4)));
          const Four x = read_shared<Four>(at);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float y = to_sum(x[e]);
            if (seen && !finite(y)) o[d][4 * a + e] += y;
          }
        }
    }
  }
};

KS_DEVICE unsigned address_of_shared(char* memory) { return (unsigned)(size_t)(KS_LOCAL char*)memory; }

// heads: those of queries; kv_heads and batch: so that the blocks of a head follow each other at a distance that 8 divides
// where there are as many heads, and find its keys in the cache that they share.
struct Count {
  int q_tiles, batch, heads, head_group;
};

KS_BODY(WARP * WAVES, 1)
attention_forward_gfx950_body(Matrices<const T> q, Matrices<const T> k, Matrices<const T> v, Matrices<T> out,
                              RowValues<float> lse, Sequences sequences, Pages pages, Count count, int left, int right,
                              float scale_log2) {
  extern __shared__ __attribute__((aligned(1024))) char memory[];
  const unsigned ring = address_of_shared(memory);
  const int kv_heads = count.heads / count.head_group, lists = count.batch * kv_heads;
  const int rest = block_index() / lists, list = block_index() % lists;
  const int batch = list / kv_heads, kv_head = list % kv_heads;
  const int head = kv_head * count.head_group + rest % count.head_group, q_tile = rest / count.head_group;
  const Sequence own = sequences.at(batch);
  const Scores seen{own.S_q, own.S_k, left, right, 0, scale_log2, 0.f, 0.f};

  // Under a causal mask the last queries have most to do: they start first.
  const int row0 = (Config::CAUSAL || Config::WINDOW ? count.q_tiles - 1 - q_tile : q_tile) * BM;
  if (row0 >= own.S_q) return;  // sequences of a batch may be shorter than its longest
  const int first = row0 + warp_index() * ROWS, mine = first + lane() % 32;

  // Tiles from the one of the first key that any query of the block sees: [0, last) are the block's, [starts, ends) the wave's; all
  // queries of the block see all keys of [full, whole), those of the wave of [opens, clear).
  const int block_last = min_of(row0 + BM, own.S_q) - 1, wave_last = min_of(first + ROWS, own.S_q) - 1;
  const KeyRange any = seen.any(row0, block_last), all = seen.all(row0, block_last);
  const KeyRange any_own = seen.any(first, wave_last), all_own = seen.all(first, wave_last);
  const int k_first = any.begin / BN * BN, keys = own.S_k - k_first;
  auto down = [=](int key) { return (key - k_first) / BN; };
  auto up = [=](int key) { return divide_up(key - k_first, BN); };
  const int last = up(any.end), full = up(all.begin), whole = down(all.end);
  const int starts = max_of(down(any_own.begin), 0), ends = up(any_own.end), opens = up(all_own.begin), clear = down(all_own.end);

  const Places places{(const KS_SCALAR int*)(pages.table + (i64)batch * pages.table_row), pages.size, k_first, last, keys};
  auto first_row = [&](const Matrices<const T>& m) {
    return m.at<Config::KV_VIEW>(batch, kv_head, kv_heads, own.k_first) + (IN_PAGES ? 0 : (i64)k_first * m.row);
  };
  Rows<true> K(first_row(k), k.batch, k.row);
  Rows<false> V(first_row(v), v.batch, v.row);
  // Of the next tile of K to copy, and of V, which is a tile behind.
  Place ahead{}, behind{};
  if (last > 0) {
    behind = places.of(0), ahead = places.of(1);
    K.copy(ring, behind, keys);
    if (last > 1) K.copy(ring + TILE, ahead, keys - BN);
    V.copy(ring + V_RING, behind, keys);
    behind = ahead, ahead = places.of(2);
  }

  Walk w;
  w.begin(ring, scale_log2);
  {
    const T* const from = q.at<Config::Q_VIEW>(batch, head, count.heads, own.q_first);
    const unsigned at = ring + Q_RING + warp_index() * ROWS * ROW;
    const int l = opaque(lane());  // else the places would be kept for the output's
#pragma unroll
    for (int i = 0; i < ROWS; i += COPY_ROWS) {
      const int row = i + l / CHUNKS, chunk = l % CHUNKS;
      write_shared(at + row * ROW + (chunk ^ k_permutation(row)) * 16,
                   load_global<Fragment>(from + (i64)min_of(first + row, own.S_q - 1) * q.row + 8 * chunk));
    }
    warp_barrier();
#pragma unroll
    for (int d = 0; d < STEPS_D; d++) w.q[d] = read_shared<Fragment>(at + (w.k_at - ring ^ d * 32));
  }
  copies_arrive();
  end_phase();

  // Copies that begin in a phase of products, of tile i + 3 of K and i + 2 of V, stages being i's.
  auto copies = [&](int i, unsigned k_stage, unsigned v_stage) {
    if (i + 3 < last) K.copy(ring + k_stage, ahead, keys - (i + 3) * BN);
    if (i + 2 < last) V.copy(ring + V_RING + v_stage, behind, keys - (i + 2) * BN);
    behind = ahead, ahead = places.of(i + 4);
  };
  auto sees = [&](int tile) { return [=](int j) { return seen.visible(0, mine, k_first + tile * BN + j); }; };
  auto has = [=](int tile) { return (!Config::WINDOW || tile >= starts) && tile < ends; };
  auto sees_all = [=](int tile) { return (!Config::WINDOW || tile >= opens) && tile < clear; };
  auto weights = [&](int tile) {
    if (has(tile)) {
      if (!sees_all(tile)) w.hide(sees(tile));
      w.weights();
    }
    copies_arrive();
    end_phase();
  };

  if (last > 0) {
    if (warp_index() >= WAVES / 2) end_phase();
    copies(-1, 2 * TILE, TILE);
    if (has(0)) w.products<true, false>(0, 0);
    end_phase();
    weights(0);
    // Three tiles that need no look at masks, and whose copies are of whole tiles: so places in LDS are constants.
    const int most = min_of(whole, min_of(last, keys / BN) - 2);
    auto threes = [&](int& i) {
      for (; i + 3 < most; i += 3) {
        unrolled<3>([&](auto n) {
          constexpr int NEXT = (n + 1) % 3, AFTER = (n + 2) % 3;
          __builtin_amdgcn_s_setprio(1);
          K.copy(ring + n * TILE, ahead);
          V.copy(ring + V_RING + AFTER * TILE, behind);
          behind = ahead, ahead = places.of(i + n + 4);
          w.products<true, true>(NEXT * TILE, n * TILE);
          __builtin_amdgcn_s_setprio(0);
          end_phase();
          w.weights();
          copies_arrive();
          end_phase();
        });
      }
    };
    int i = 0;
    const int from = Config::WINDOW ? divide_up(full, 3) * 3 : 0;
    if (!Config::WINDOW) threes(i);
    unsigned stage = 0, next = TILE, after = 2 * TILE;
#pragma unroll 1
    for (; i < last; i++) {
      if (Config::WINDOW && i == from) threes(i);
      copies(i, stage, after);
      if (has(i + 1)) w.products<true, false>(next, 0);
      if (sees_all(i)) w.products<false, true>(0, stage);
      else if (has(i)) w.add_values_hidden(ring + V_RING + stage, stage, min_of(keys - i * BN, BN), sees(i));
      end_phase();
      if (i + 1 < last) weights(i + 1);
      const unsigned before = stage;
      stage = next, next = after, after = before;
    }
    if (warp_index() < WAVES / 2) end_phase();
  }

  const float l = both_sum(w.l.x + w.l.y), inverse = l == 0.f ? 0.f : 1.f / l;
  if (Config::LSE && lane() < 32 && mine < own.S_q)
    lse.base[(i64)batch * lse.batch + head * lse.head + own.q_first + mine] =
        l == 0.f ? -infinity() : 0.69314718056f * (w.base + log2_fast(l));
  PlainTile<T, ROWS, D> staged(memory + warp_index() * ROWS * ROW);
#pragma unroll
  for (int d = 0; d < BLOCKS_D; d++)
#pragma unroll
    for (int a = 0; a < 4; a++) {
      const Block& o = w.o[d];
      const Part x = {pack<T>(o[4 * a] * inverse, o[4 * a + 1] * inverse), pack<T>(o[4 * a + 2] * inverse, o[4 * a + 3] * inverse)};
      *(Part*)&staged.at(lane() % 32, 32 * d + 8 * a + lane() / 32 * 4) = x;
    }
  warp_barrier();
  const StridedView<T> O{out.at<Config::Q_VIEW>(batch, head, count.heads, own.q_first), out.row};
  warp_copy_out<16>(staged, O, first, own.S_q, 0, D);
}
