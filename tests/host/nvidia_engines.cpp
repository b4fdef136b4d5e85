// NVIDIA's wide engine and the SIMT engine with paired lanes on the host: lanes one after another; what they hand to the matrix
// instruction is put together and multiplied as the PTX manual says that m16n8k8 does. Prints a line for each way that is wrong.
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __constant__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n)
#define KS_MATRIX_DOUBLE 1
#define __CUDA_ARCH__ 900
struct uint4 { unsigned x, y, z, w; };
static struct { int x; } threadIdx, blockIdx;  // of one lane at a time
template<class T> T __shfl_sync(unsigned, T x, int) { return x; }
template<class T> T __shfl_xor_sync(unsigned, T x, int) { return x; }
inline void __syncthreads() {}
inline int __syncthreads_or(bool x) { return x; }
inline int __any_sync(unsigned, bool x) { return x; }
inline void __syncwarp() {}
inline float fmaxf(float a, float b) { return a > b ? a : b; }
inline double fmax(double a, double b) { return a > b ? a : b; }
inline float __log2f(float x) { return x; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { return __int_as_float((int)x); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline unsigned long long __cvta_generic_to_shared(const void* p) { return (unsigned long long)p; }
#include "platform_nvidia.h"
#include "tile/simt.h"

// What one lane hands over for a slab of k: its part of two rows of A, of one column of B, and where the sums are.
template<class T, int KV> struct Handed { T a[2][KV], b[KV]; T* c[4]; };
static std::vector<Handed<double, 2>> handed_double[32];
static std::vector<Handed<float, 4>> handed_float[32];
static std::vector<Handed<double, 2>>& handed(double) { return handed_double[lane()]; }
static std::vector<Handed<float, 4>>& handed(float) { return handed_float[lane()]; }

template<class T, int KV> struct Recorded {
  static constexpr int K_STEP = 16, SUMS = 1;
  template<int R, int C> static constexpr int UNROLL = 1;
  struct Left {
    T x[2][KV];
    void set(const T (&from)[2][KV]) { memcpy(x, from, sizeof x); }
  };
  struct Right {
    T x[KV];
    explicit Right(const T (&from)[KV]) { memcpy(x, from, sizeof x); }
  };
  static void add(T& c0, T& c1, T& c2, T& c3, const Left& a, const Right& b, int) {
    Handed<T, KV> h;
    memcpy(h.a, a.x, sizeof h.a), memcpy(h.b, b.x, sizeof h.b);
    h.c[0] = &c0, h.c[1] = &c1, h.c[2] = &c2, h.c[3] = &c3;
    handed(T()).push_back(h);
  }
};

static int wrong = 0;
static void expect(bool right, const char* what) {
  if (!right) printf("%s\n", what), wrong++;
}

template<class T, int KV> void multiply(std::vector<Handed<T, KV>> (&lanes)[32]) {
  for (size_t i = 0; i < lanes[0].size(); i++)
    for (int s = 0; s < KV; s += 2) {  // an instruction: a0 … a3 = rows g and g + 8 of k = t, then of k = t + 4
      T a[16][8], b[8][8], c[16][8] = {};
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < 2; e++) {
          const int g = l / 4, t = l % 4;
          a[g][t + 4 * e] = lanes[l][i].a[0][s + e], a[g + 8][t + 4 * e] = lanes[l][i].a[1][s + e];
          b[t + 4 * e][g] = lanes[l][i].b[s + e];
        }
      for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++)
          for (int k = 0; k < 8; k++) c[m][n] += a[m][k] * b[k][n];
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < 4; e++) *lanes[l][i].c[e] += c[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2];
    }
  for (auto& l : lanes) l.clear();
}

// Whether the lanes of one transaction, 16 bytes a lane of 8 or 8 bytes of 16, meet every bank at most once.
template<class T> bool apart(const T* const (&at)[32], int lanes, const char* base) {
  for (int first = 0; first < 32; first += lanes) {
    int used[32] = {};
    for (int l = first; l < first + lanes; l++)
      for (int w = 0; w < 128 / 4 / lanes; w++)
        if (used[((const char*)at[l] - base) / 4 % 32 + w]++) return false;
  }
  return true;
}

template<class T> T element(int n, int k, int seed) { return T((n * 7 + k * 13 + seed) % 11 - 5); }
// N indices by K, along k where LAST.
template<int N, int K, bool LAST, class Tile> void fill(Tile t, int seed) {
  for (int k = 0; k < K; k++)
    for (int n = 0; n < N; n++) (LAST ? t.at(n, k) : t.at(k, n)) = element<typename Tile::T>(n, k, seed);
}

template<class T, int BM, int BN, int BK, bool A_LAST, bool B_LAST> void check(const char* what) {
  constexpr int KV = 16 / (int)sizeof(T), WM = 32, WN = 32;
  typedef WideEngine<T, Recorded<T, KV>> E;
  typedef typename E::template Tile<BM, BK, A_LAST> TileA;
  typedef typename E::template Tile<BN, BK, B_LAST> TileB;
  alignas(128) static char memory[TileA::BYTES + TileB::BYTES];
  TileA a(memory);
  TileB b(memory + TileA::BYTES);
  const auto value = element<T>;
  fill<BM, BK, A_LAST>(a, 1), fill<BN, BK, B_LAST>(b, 3);
  for (int row0 = 0; row0 < BM; row0 += WM)
    for (int n0 = 0; n0 < BN; n0 += WN) {
      static typename E::template Acc<WM, WN> acc[32];
      for (int k = 0; k < BK; k += E::K_STEP) {
        for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) {
          if (k == 0) E::zero(acc[lane()]);
          E::mma(acc[lane()], E::template operand<WM, E::K_STEP>(a, row0, k), b, n0, k);
        }
        if constexpr (sizeof(T) == 8) multiply<T, KV>(handed_double);
        else multiply<T, KV>(handed_float);
      }
      static int seen[WM][WN];
      memset(seen, 0, sizeof seen);
      alignas(128) static char laid_out[WM * WN * sizeof(T)];
      bool right = true;
      for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) {
        E::map(acc[lane()], [&](int i, int j, T x) {
          T want = 0;
          for (int k = 0; k < BK; k++) want += value(row0 + i, k, 1) * value(n0 + j, k, 3);
          right &= x == want && ++seen[i][j] == 1;
          return x;
        });
        E::map_pairs(acc[lane()], [&](int i, int j, T x, T y) {
          T want = 0, next = 0;
          for (int k = 0; k < BK; k++) {
            want += value(row0 + i, k, 1) * value(n0 + j, k, 3);
            next += value(row0 + i, k, 1) * value(n0 + j + 1, k, 3);
          }
          right &= x == want && y == next;
        });
        E::to_shared(PlainTile<T, WM, WN>(laid_out), acc[lane()]);
      }
      for (int i = 0; i < WM; i++)
        for (int j = 0; j < WN; j++) {
          T want = 0;
          for (int k = 0; k < BK; k++) want += value(row0 + i, k, 1) * value(n0 + j, k, 3);
          right &= PlainTile<T, WM, WN>(laid_out).at(i, j) == want;
        }
      for (auto& row : seen)
        for (int n : row) right &= n == 1;
      expect(right, what);
    }
  const T* at[32];
  auto all_lanes = [&](auto place) {
    for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) at[lane()] = place(lane_group(), lane_in_group());
  };
  for (int n0 = 0; n0 < BM; n0 += 16)
    for (int k0 = 0; k0 < BK; k0 += 4 * KV)
      for (int i = 0; i < (A_LAST ? 2 : KV); i++) {
        all_lanes([&](int g, int t) {
          return A_LAST ? a.place(n0, 2 * g + i, k0 & ~15, (k0 & 15) + KV * t) : a.place(k0 & ~15, (k0 & 15) + KV * t + i, n0, 2 * g);
        });
        expect(apart(at, A_LAST || KV == 2 ? 8 : 16, memory), "banks");
      }
}

// A load of the SIMT engine: lanes in pairs that ask for the same, and each half of the warp meets no bank twice.
template<int BYTES> bool served_at_once(const char* const (&at)[32], const char* base) {
  bool pairs[2] = {true, true};
  for (int l = 0; l < 32; l++)
    for (int p = 0; p < 2; p++) pairs[p] &= at[l] == at[l ^ (1 << p)];
  for (int half = 0; half < 32; half += 16) {
    const char* bank[32] = {};
    for (int l = half; l < half + 16; l++)
      for (int w = 0; w < BYTES; w += 4) {
        const char*& used = bank[(at[l] + w - base) / 4 % 32];
        if (used && used != at[l] + w) return false;
        used = at[l] + w;
      }
  }
  return pairs[0] || pairs[1];
}

template<class T, int BM, int BN, int BK, bool A_LAST, bool B_LAST, int WM> void check_simt(const char* what) {
  constexpr int WN = 32;
  typedef SimtEngine<T> E;
  typedef typename E::template Tile<BM, BK, A_LAST> TileA;
  typedef typename E::template Tile<BN, BK, B_LAST> TileB;
  alignas(128) static char memory[TileA::BYTES + TileB::BYTES];
  TileA a(memory);
  TileB b(memory + TileA::BYTES);
  const auto value = element<T>;
  fill<BM, BK, A_LAST>(a, 1), fill<BN, BK, B_LAST>(b, 3);
  bool right = true, banks = true;
  for (int row0 = 0; row0 < BM; row0 += WM)
    for (int n0 = 0; n0 < BN; n0 += WN) {
      static int seen[WM][WN];
      memset(seen, 0, sizeof seen);
      for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) {
        typename E::template Acc<WM, WN> acc;
        E::zero(acc);
        for (int k = 0; k < BK; k += E::K_STEP) E::mma(acc, E::template operand<WM, E::K_STEP>(a, row0, k), b, n0, k);
        E::map(acc, [&](int i, int j, T x) {
          T want = 0;
          for (int k = 0; k < BK; k++) want += value(row0 + i, k, 1) * value(n0 + j, k, 3);
          right &= x == want;
          seen[i][j]++;
          return x;
        });
      }
      for (auto& row : seen)
        for (int n : row) right &= n == 1;
      for (int k = 0; k < 16; k++) {
        const char* at[32];
        for (int i = 0; i < WM / 8; i++) {
          constexpr int N = E::template VR<WM>;
          for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) {
            const typename E::template Reader<TileA, N, 8> reader(a, row0, E::p(), 0);
            at[lane()] = A_LAST ? (const char*)&reader.along_k(i, k / E::KV * E::KV) : (const char*)&reader.along_n(i / N * N, k);
          }
          banks &= served_at_once<A_LAST ? 16 : N * (int)sizeof(T)>(at, memory);
        }
        for (int i = 0; i < WN / E::Q; i++) {
          for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) {
            const typename E::template Reader<TileB, E::V, E::Q> reader(b, n0, E::q(), 0);
            at[lane()] = B_LAST ? (const char*)&reader.along_k(i, k / E::KV * E::KV) : (const char*)&reader.along_n(i / E::V * E::V, k);
          }
          banks &= served_at_once<16>(at, memory);
        }
      }
    }
  expect(right, what);
  expect(banks, "banks");
}

int main() {
  check<double, 64, 32, 16, true, true>("double, both along k");
  check<double, 32, 64, 16, true, false>("double, B along n");
  check<double, 64, 64, 16, false, true>("double, A along m");
  check<double, 128, 32, 32, false, false>("double, neither along k");
  check<float, 64, 32, 32, true, true>("float, both along k");
  check<float, 32, 64, 32, true, false>("float, B along n");
  check<float, 64, 64, 32, false, true>("float, A along m");
  check<float, 128, 32, 64, false, false>("float, neither along k");
  check_simt<float, 128, 32, 16, true, true, 64>("SIMT, both along k");
  check_simt<float, 64, 64, 16, true, false, 32>("SIMT, B along n");
  check_simt<float, 32, 32, 16, false, true, 16>("SIMT, A along m");
  check_simt<float, 128, 64, 16, false, false, 64>("SIMT, neither along k");
  check_simt<float, 24, 32, 64, true, true, 8>("SIMT of 8 rows, both along k");
  check_simt<float, 64, 32, 64, true, false, 16>("SIMT of 16 rows, B along n");
  check_simt<double, 64, 32, 16, true, true, 32>("SIMT of double, both along k");
  check_simt<double, 64, 32, 16, false, false, 32>("SIMT of double, neither along k");
  return wrong != 0;
}
