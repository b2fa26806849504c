// y = x w^T with an order of additions along K that depends on K alone.
//
// Lane form (fp32, and bf16 without matrix instructions): 16 partial sums over k mod 16, each in rising k, folded by
// the tree of hsum. Both operands are read as they lie, so a decode step reads each weight once and packs nothing.
// How rows and columns are grouped into register blocks, panels and threads does not touch the order of any element;
// a panel of K hands its partial sums on through memory, which keeps them as they are.
// The matrix form of bf16 is in gemm_amx.cpp.
#include <memory>

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

#if defined(VIME_AVX512)
constexpr int MR = 6, NR = 4, NR_SMALL = 8;
#else
constexpr int MR = 3, NR = 4, NR_SMALL = 4;
#endif

template <class T>
struct Panel {  // K elements of some rows of x and w; partial sums come from and go to `carry` unless first or last
  int64_t K;
  const T* x;
  int64_t ldx;
  const T* w;
  int64_t ldw;
  T* y;
  int64_t ldy;
  bool first, last;
};

// M x N elements of y. N is 1 or a multiple of 4.
template <class S, int M, int N>
inline void block(const Panel<typename S::T>& p, int64_t m, int64_t n, float* carry) {
  using T = typename S::T;
  const T *x = p.x + m * p.ldx, *w = p.w + n * p.ldw;
  F16 sum[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = p.first ? zero() : load(carry + (i * N + j) * W);
  int64_t k = 0;
  for (; k + S::width <= p.K; k += S::width) {
    typename S::V wv[N];
    for (int j = 0; j < N; ++j) wv[j] = S::load(w + j * p.ldw + k);
    for (int i = 0; i < M; ++i) {
      typename S::V xv = S::load(x + i * p.ldx + k);
      for (int j = 0; j < N; ++j) sum[i][j] = S::mul_add(xv, wv[j], sum[i][j]);
    }
  }
  if (k < p.K) {
    const int left = int(p.K - k);
    typename S::V wv[N];
    for (int j = 0; j < N; ++j) wv[j] = S::load_n(w + j * p.ldw + k, left);
    for (int i = 0; i < M; ++i) {
      typename S::V xv = S::load_n(x + i * p.ldx + k, left);
      for (int j = 0; j < N; ++j) sum[i][j] = S::mul_add(xv, wv[j], sum[i][j]);
    }
  }
  if (!p.last) {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < N; ++j) store(carry + (i * N + j) * W, sum[i][j]);
    return;
  }
  for (int i = 0; i < M; ++i) {
    T* y = p.y + (m + i) * p.ldy + n;
    if constexpr (N == 1) {
      put(y, hsum(sum[i][0]));
    } else {
      float out[N];
      for (int j = 0; j < N; j += 4) hsum4(&sum[i][j], out + j);
      for (int j = 0; j < N; ++j) put(y + j, out[j]);
    }
  }
}

template <class S, int M>
void columns(const Panel<typename S::T>& p, int64_t m, int64_t N, float* carry) {
  constexpr int step = M <= 2 ? NR_SMALL : NR;
  int64_t n = 0;
  for (; n + step <= N; n += step, carry += M * step * W) block<S, M, step>(p, m, n, carry);
  for (; n < N; ++n, carry += M * W) block<S, M, 1>(p, m, n, carry);
}

template <class S>
void rows(const Panel<typename S::T>& p, int64_t M, int64_t N, float* carry) {
  int64_t m = 0;
#if defined(VIME_AVX512)
  for (; m + 2 * MR <= M; m += 2 * MR)  // two blocks of rows share a visit to the weights while those are near
    for (int64_t n = 0; n < N; n += NR, carry += 2 * MR * NR * W) {
      if (n + NR <= N) {
        block<S, MR, NR>(p, m, n, carry);
        block<S, MR, NR>(p, m + MR, n, carry + MR * NR * W);
        continue;
      }
      for (int64_t j = n; j < N; ++j) {
        block<S, MR, 1>(p, m, j, carry + (j - n) * 2 * MR * W);
        block<S, MR, 1>(p, m + MR, j, carry + ((j - n) * 2 + 1) * MR * W);
      }
    }
#endif
  for (; m + MR <= M; m += MR, carry += MR * N * W) columns<S, MR>(p, m, N, carry);
  switch (M - m) {
    case 1: return columns<S, 1>(p, m, N, carry);
    case 2: return columns<S, 2>(p, m, N, carry);
#if defined(VIME_AVX512)
    case 3: return columns<S, 3>(p, m, N, carry);
    case 4: return columns<S, 4>(p, m, N, carry);
    case 5: return columns<S, 5>(p, m, N, carry);
#endif
    default: return;
  }
}

template <class S>
void lane_gemm(int64_t M, int64_t N, int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  // A panel of K of two row blocks of x fits the first-level cache; one of the weights' slab fits the second.
  const int64_t bytes = K * int64_t(sizeof(typename S::T)), panels = M <= MR || bytes <= 4096 ? 1 : (bytes + 2047) / 2048;
  const int64_t kc = (K + panels * 32 - 1) / (panels * 32) * 32;
  const int64_t nc = M <= MR ? 64 : panels > 1 ? 64 : std::max<int64_t>(32, 131072 / bytes / NR * NR);
  const int64_t mc = panels > 1 ? 48 : 240, slabs = (N + nc - 1) / nc, blocks = (M + mc - 1) / mc;
  parallel(slabs * blocks, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<float[]> carry(panels > 1 ? new float[size_t((mc + 1) * (nc + NR) * W)] : nullptr);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t m = task % blocks * mc, n = task / blocks * nc;
      for (int64_t k = 0; k < K; k += kc) {
        Panel<typename S::T> p{std::min(kc, K - k), x + m * ldx + k, ldx, w + n * ldw + k, ldw, y + m * ldy + n, ldy, k == 0, k + kc >= K};
        rows<S>(p, std::min(mc, M - m), std::min(nc, N - n), carry.get());
      }
    }
  });
}

}  // namespace

const char* gemm_kind(float) { return "f32-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy) {
  lane_gemm<StepF32>(M, N, K, x, ldx, w, ldw, y, ldy);
}

#if !defined(__AMX_BF16__)
const char* gemm_kind(bf16) { return StepBF16::width == 32 ? "avx512-bf16" : "bf16-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, bf16* y, int64_t ldy) {
  lane_gemm<StepBF16>(M, N, K, x, ldx, w, ldw, y, ldy);
}
#endif

#if defined(VIME_AVX512)
inline __m512i load_words(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_epi32(mask, p); }
inline __m512i load_words(__mmask16 mask, const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)); }
inline void store_words(__mmask16 mask, float* p, __m512i v) { _mm512_mask_storeu_epi32(p, mask, v); }
inline void store_words(__mmask16 mask, bf16* p, __m512i v) { _mm256_mask_storeu_epi16(p, mask, _mm512_cvtepi32_epi16(v)); }
#endif

template <class T>
void transpose(int64_t rows, int64_t cols, const T* x, int64_t ldx, T* y) {
  parallel((cols + W - 1) / W, 2, [&](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * W; c0 < std::min(end * W, cols); c0 += W)
      for (int64_t r0 = 0; r0 < rows; r0 += W) {
        const int64_t nc = std::min<int64_t>(W, cols - c0), nr = std::min<int64_t>(W, rows - r0);
#if defined(VIME_AVX512)
        const __mmask16 wide = __mmask16((1u << nc) - 1), high = __mmask16((1u << nr) - 1);
        __m512i words[W];
        for (int64_t r = 0; r < W; ++r) words[r] = r < nr ? load_words(wide, x + (r0 + r) * ldx + c0) : _mm512_setzero_si512();
        transpose16(words);
        for (int64_t c = 0; c < nc; ++c) store_words(high, y + (c0 + c) * rows + r0, words[c]);
#else
        for (int64_t c = c0; c < c0 + nc; ++c)
          for (int64_t r = r0; r < r0 + nr; ++r) y[c * rows + r] = x[r * ldx + c];
#endif
      }
  });
}
template void transpose(int64_t, int64_t, const float*, int64_t, float*);
template void transpose(int64_t, int64_t, const bf16*, int64_t, bf16*);

}  // namespace vime
