// y = x w^T with an order of additions along K that depends on K alone.
//
// Lane form (fp32, and bf16 without matrix instructions): 16 partial sums over k mod 16, each in rising k, folded by
// the tree of hsum. Both operands are read as they lie, so a decode step reads each weight once and packs nothing.
// How rows and columns are grouped into register blocks, tasks and threads does not touch the order of any element.
// The matrix form of bf16 is in gemm_amx.cpp.
#include "kernels.h"

namespace vime {
namespace {

// One step along K: fp32 takes 16 elements by FMA; bf16 the same after widening, or 32 by vdpbf16ps.
struct StepF32 {
  using T = float;
  using V = F16;
  static constexpr int width = 16;
  static V load(const T* p) { return vime::load(p); }
  static V load_n(const T* p, int n) { return vime::load_n(p, n); }
  static F16 mul_add(V a, V b, F16 c) { return fma(a, b, c); }
};
#if defined(VIME_AVX512) && defined(__AVX512BF16__)
struct StepBF16 {
  using T = bf16;
  using V = __m512bh;
  static constexpr int width = 32;
  static V load(const T* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static V load_n(const T* p, int n) { return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p); }
  static F16 mul_add(V a, V b, F16 c) { return {_mm512_dpbf16_ps(c.v, a, b)}; }
};
#else
struct StepBF16 {
  using T = bf16;
  using V = F16;
  static constexpr int width = 16;
  static V load(const T* p) { return vime::load(p); }
  static V load_n(const T* p, int n) { return vime::load_n(p, n); }
  static F16 mul_add(V a, V b, F16 c) { return fma(a, b, c); }
};
#endif

// MR x NR elements of y. NR is 1 or a multiple of 4.
template <class S, int MR, int NR>
inline void block(int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  F16 sum[MR][NR];
  for (int m = 0; m < MR; ++m) for (int n = 0; n < NR; ++n) sum[m][n] = zero();
  int64_t k = 0;
  for (; k + S::width <= K; k += S::width) {
    typename S::V wv[NR];
    for (int n = 0; n < NR; ++n) wv[n] = S::load(w + n * ldw + k);
    for (int m = 0; m < MR; ++m) {
      typename S::V xv = S::load(x + m * ldx + k);
      for (int n = 0; n < NR; ++n) sum[m][n] = S::mul_add(xv, wv[n], sum[m][n]);
    }
  }
  if (k < K) {
    const int left = int(K - k);
    typename S::V wv[NR];
    for (int n = 0; n < NR; ++n) wv[n] = S::load_n(w + n * ldw + k, left);
    for (int m = 0; m < MR; ++m) {
      typename S::V xv = S::load_n(x + m * ldx + k, left);
      for (int n = 0; n < NR; ++n) sum[m][n] = S::mul_add(xv, wv[n], sum[m][n]);
    }
  }
  for (int m = 0; m < MR; ++m) {
    if constexpr (NR == 1) {
      put(y + m * ldy, hsum(sum[m][0]));
    } else {
      float out[NR];
      for (int n = 0; n < NR; n += 4) hsum4(&sum[m][n], out + n);
      for (int n = 0; n < NR; ++n) put(y + m * ldy + n, out[n]);
    }
  }
}

#if defined(VIME_AVX512)
constexpr int MR = 6, NR = 4, NR_SMALL = 8;
#else
constexpr int MR = 3, NR = 4, NR_SMALL = 4;
#endif

template <class S, int M>
void columns(int64_t N, int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  constexpr int step = M <= 2 ? NR_SMALL : NR;
  int64_t n = 0;
  for (; n + step <= N; n += step) block<S, M, step>(K, x, ldx, w + n * ldw, ldw, y + n, ldy);
  for (; n < N; ++n) block<S, M, 1>(K, x, ldx, w + n * ldw, ldw, y + n, ldy);
}

template <class S>
void rows(int64_t M, int64_t N, int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  int64_t m = 0;
  for (; m + MR <= M; m += MR) columns<S, MR>(N, K, x + m * ldx, ldx, w, ldw, y + m * ldy, ldy);
  x += m * ldx, y += m * ldy;
  switch (M - m) {
    case 1: return columns<S, 1>(N, K, x, ldx, w, ldw, y, ldy);
    case 2: return columns<S, 2>(N, K, x, ldx, w, ldw, y, ldy);
#if defined(VIME_AVX512)
    case 3: return columns<S, 3>(N, K, x, ldx, w, ldw, y, ldy);
    case 4: return columns<S, 4>(N, K, x, ldx, w, ldw, y, ldy);
    case 5: return columns<S, 5>(N, K, x, ldx, w, ldw, y, ldy);
#endif
    default: return;
  }
}

template <class S>
void lane_gemm(int64_t M, int64_t N, int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  // A task is a slab of columns whose weights stay in the first-level cache while all rows of a block pass by.
  const int64_t bytes = K * int64_t(sizeof(typename S::T));
  int64_t nc = std::max<int64_t>(1, 16384 / std::max<int64_t>(bytes, 1)) * NR;
  if (M <= MR) nc = 64;
  const int64_t mc = 96, slabs = (N + nc - 1) / nc, blocks = (M + mc - 1) / mc;
  parallel(slabs * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t m = task / slabs * mc, n = task % slabs * nc;
      rows<S>(std::min(mc, M - m), std::min(nc, N - n), K, x + m * ldx, ldx, w + n * ldw, ldw, y + m * ldy + n, ldy);
    }
  });
}

}  // namespace

const char* gemm_kind(float) { return "f32-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy) {
  lane_gemm<StepF32>(M, N, K, x, ldx, w, ldw, y, ldy);
}

#if !defined(__AMX_BF16__)
const char* gemm_kind(bf16) { return StepBF16::width == 32 ? "avx512-bf16" : "f32-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, bf16* y, int64_t ldy) {
  lane_gemm<StepBF16>(M, N, K, x, ldx, w, ldw, y, ldy);
}
#endif

template <class T>
void transpose(int64_t rows, int64_t cols, const T* x, int64_t ldx, T* y) {
  constexpr int64_t B = 32;
  parallel((cols + B - 1) / B, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * B; c0 < std::min(end * B, cols); c0 += B)
      for (int64_t r0 = 0; r0 < rows; r0 += B)
        for (int64_t c = c0; c < std::min(c0 + B, cols); ++c)
          for (int64_t r = r0; r < std::min(r0 + B, rows); ++r) y[c * rows + r] = x[r * ldx + c];
  });
}
template void transpose(int64_t, int64_t, const float*, int64_t, float*);
template void transpose(int64_t, int64_t, const bf16*, int64_t, bf16*);

}  // namespace vime
