// Register blocks of y = x w^T over 16 lanes of k: partial sums stay in registers along a panel of K.
//
// An element's partial sums are over k mod 16, each in rising k, folded by the tree of hsum, whatever block it is in.
#pragma once
#include "kernels.h"

namespace vime {

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

// Rows and columns of a block: as many as keep the partial sums in registers.
#if defined(VIME_AVX512)
constexpr int MR = 6;
constexpr int columns_of(int rows) { return rows <= 2 ? 8 : 4; }
#else
constexpr int MR = 3;
constexpr int columns_of(int) { return 4; }
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

// What a block asks for while it computes, a line a step: the same columns of other rows of w (0: none), a row of x.
template <class T>
struct Ahead { int64_t w; const T* x; };

#if defined(VIME_AVX512)
// The sums of eight vectors, each by the tree of hsum. Blends take the place of half of the shuffles; a sum
// whose operands are swapped by that is the same sum.
inline __m256 hsum8(F16 a, F16 b, F16 c, F16 d, F16 e, F16 f, F16 g, F16 h) {
  auto halves = [](F16 p, F16 q) { return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, p.v, q.v), _mm512_shuffle_f32x4(p.v, q.v, 0x4E)); };
  auto quarters = [](__m512 p, __m512 q) {  // one element of each, in the order p, q, p, q
    const __m512 swapped = _mm512_mask_blend_ps(0x0F0F, p, q);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, p, q), _mm512_shuffle_f32x4(swapped, swapped, 0xB1));
  };
  const __m512 p = quarters(halves(a, b), halves(c, d)), q = quarters(halves(e, f), halves(g, h));
  const __m512 pairs = _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, p, q), _mm512_shuffle_ps(p, q, 0x4E));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1));
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0), sums));
}
inline void put8(float* y, float* z, __m256 v) { _mm_storeu_ps(y, _mm256_castps256_ps128(v)); _mm_storeu_ps(z, _mm256_extractf128_ps(v, 1)); }
inline void put8(bf16* y, bf16* z, __m256 v) {
  const __m128i r = _mm256_castsi256_si128(round_bf16(_mm512_castps256_ps512(v)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(y), r);
  _mm_storeh_pd(reinterpret_cast<double*>(z), _mm_castsi128_pd(r));
}
inline void put4(float* y, __m256 v) { _mm_storeu_ps(y, _mm256_castps256_ps128(v)); }
inline void put4(bf16* y, __m256 v) { _mm_storel_epi64(reinterpret_cast<__m128i*>(y), _mm256_castsi256_si128(round_bf16(_mm512_castps256_ps512(v)))); }
#endif

// M x N elements of y. N is 1 or a multiple of 4. Whole: K is a multiple of a step.
template <class S, int M, int N, bool Whole>
inline void block(const Panel<typename S::T>& p, int64_t m, int64_t n, float* carry, Ahead<typename S::T> ahead) {
  using T = typename S::T;
  using V = typename S::V;
  const T *x = p.x + m * p.ldx, *w = p.w + n * p.ldw;
  F16 sum[M][N];
  if (p.first) each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { sum[i][j] = zero(); }); });
  else each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { sum[i][j] = load(carry + (i * N + j) * W); }); });
  const T* beyond = w + ahead.w;
  int64_t k = 0;
  for (; k + S::width <= p.K; k += S::width) {
    V wv[N];
    each<N>(VIME_DO(j) { wv[j] = S::load(w + j * p.ldw + k); });
    each<N>(VIME_DO(j) { __builtin_prefetch(beyond + j * p.ldw + k); });
    __builtin_prefetch(ahead.x + k, 0, 2);
    each<M>(VIME_DO(i) {
      const V xv = S::load(x + i * p.ldx + k);
      each<N>(VIME_DO(j) { sum[i][j] = S::mul_add(xv, wv[j], sum[i][j]); });
    });
  }
  if constexpr (!Whole) {
    const int left = int(p.K - k);
    V wv[N];
    each<N>(VIME_DO(j) { wv[j] = S::load_n(w + j * p.ldw + k, left); });
    each<M>(VIME_DO(i) {
      const V xv = S::load_n(x + i * p.ldx + k, left);
      each<N>(VIME_DO(j) { sum[i][j] = S::mul_add(xv, wv[j], sum[i][j]); });
    });
  }
  if (!p.last) {
    each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { store(carry + (i * N + j) * W, sum[i][j]); }); });
    return;
  }
  T* y = p.y + m * p.ldy + n;
  if constexpr (N == 1) {
    each<M>(VIME_DO(i) { put(y + i * p.ldy, hsum(sum[i][0])); });
#if defined(VIME_AVX512)
  } else if constexpr (N == 8) {
    each<M>(VIME_DO(i) { put8(y + i * p.ldy, y + i * p.ldy + 4, hsum8(sum[i][0], sum[i][1], sum[i][2], sum[i][3], sum[i][4], sum[i][5], sum[i][6], sum[i][7])); });
  } else {
    each<M / 2>(VIME_DO(h) {
      constexpr int i = 2 * h;
      put8(y + i * p.ldy, y + (i + 1) * p.ldy, hsum8(sum[i][0], sum[i][1], sum[i][2], sum[i][3], sum[i + 1][0], sum[i + 1][1], sum[i + 1][2], sum[i + 1][3]));
    });
    if constexpr (M % 2) put4(y + (M - 1) * p.ldy, hsum8(sum[M - 1][0], sum[M - 1][1], sum[M - 1][2], sum[M - 1][3], zero(), zero(), zero(), zero()));
#else
  } else {
    each<M>(VIME_DO(i) {
      float out[4];
      hsum4(sum[i], out);
      each<4>(VIME_DO(j) { put(y + i * p.ldy + j, out[j]); });
    });
#endif
  }
}

#if defined(VIME_AVX2)
// Where two registers a partial sum are too many: lanes 0 to 7 along the whole panel, then lanes 8 to 15.
inline __m256 half(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 half(const bf16* p) { return widen8(p); }
template <class T> inline __m256 half_n(const T* p, int n) { T t[8] = {}; if (n > 0) std::memcpy(t, p, size_t(std::min(n, 8)) * sizeof(T)); return half(t); }

template <class S, int M, int N, bool Whole>
inline void block_by_halves(const Panel<typename S::T>& p, int64_t m, int64_t n, float* carry, Ahead<typename S::T> ahead) {
  using T = typename S::T;
  T* y = p.y + m * p.ldy + n;
  __m256 low[M][N];
  each<2>(VIME_DO(h) {
    const T *x = p.x + m * p.ldx + h * 8, *w = p.w + n * p.ldw + h * 8, *beyond = w + ahead.w;
    __m256 sum[M][N];
    if (p.first) each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { sum[i][j] = _mm256_setzero_ps(); }); });
    else each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { sum[i][j] = _mm256_loadu_ps(carry + (i * N + j) * W + h * 8); }); });
    int64_t k = 0;
    for (; k + W <= p.K; k += W) {
      __m256 xv[M];
      each<M>(VIME_DO(i) { xv[i] = half(x + i * p.ldx + k); });
      if constexpr (h == 0) {
        each<N>(VIME_DO(j) { __builtin_prefetch(beyond + j * p.ldw + k); });
        __builtin_prefetch(ahead.x + k, 0, 2);
      }
      each<N>(VIME_DO(j) {
        const __m256 wv = half(w + j * p.ldw + k);
        each<M>(VIME_DO(i) { sum[i][j] = _mm256_fmadd_ps(xv[i], wv, sum[i][j]); });
      });
    }
    if constexpr (!Whole) {
      const int left = int(p.K - k) - h * 8;
      __m256 xv[M];
      each<M>(VIME_DO(i) { xv[i] = half_n(x + i * p.ldx + k, left); });
      each<N>(VIME_DO(j) {
        const __m256 wv = half_n(w + j * p.ldw + k, left);
        each<M>(VIME_DO(i) { sum[i][j] = _mm256_fmadd_ps(xv[i], wv, sum[i][j]); });
      });
    }
    if (!p.last) {
      each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { _mm256_storeu_ps(carry + (i * N + j) * W + h * 8, sum[i][j]); }); });
    } else if constexpr (h == 0) {
      each<M>(VIME_DO(i) { each<N>(VIME_DO(j) { low[i][j] = sum[i][j]; }); });
    } else {
      each<M>(VIME_DO(i) {
        const F16 row[4] = {{low[i][0], sum[i][0]}, {low[i][1], sum[i][1]}, {low[i][2], sum[i][2]}, {low[i][3], sum[i][3]}};
        float out[4];
        hsum4(row, out);
        each<4>(VIME_DO(j) { put(y + i * p.ldy + j, out[j]); });
      });
    }
  });
}
#endif
template <class S, int M, int N, bool Whole>
inline void block_of(const Panel<typename S::T>& p, int64_t m, int64_t n, float* carry, Ahead<typename S::T> ahead) {
#if defined(VIME_AVX2)
  if constexpr (N > 1 && 2 * M * N > 12) return block_by_halves<S, M, N, Whole>(p, m, n, carry, ahead);
#endif
  block<S, M, N, Whole>(p, m, n, carry, ahead);
}

}  // namespace vime
