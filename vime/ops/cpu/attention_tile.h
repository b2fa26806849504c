// How keys and values lie in memory, and the two inner products of attention on one tile of 64 keys.
//
// Keys and values lie in groups of 16 keys, in the cache of an engine as in the packed form. In fp32 a group of keys is
// [D][16] and one of values [16][D]; in bf16 two neighbours along the reduction share a word: keys [D/2][16][2], values
// [8][D][2]. Lanes are keys in the first product and head dimensions in the second, so no sum runs across lanes:
// scores add over d in rising order, outputs over keys in rising order, whatever the number of rows in a block.
#pragma once
#include "kernels.h"

namespace vime {

constexpr int64_t TILE = 64;   // keys; part of the contract
constexpr int64_t GROUPS = TILE / W;

template <class T> constexpr int ELEMENTS = 4 / int(sizeof(T));  // neighbours along the reduction that share a word

template <class T>
struct Tile {  // four groups of 16 keys
  const T* keys[GROUPS];
  const T* values[GROUPS];
};

// One key or value [D] into its lane of a group.
inline void put_key(float* group, int64_t lane, const float* k, int64_t D) { for (int64_t d = 0; d < D; ++d) group[d * W + lane] = k[d]; }
inline void put_value(float* group, int64_t lane, const float* v, int64_t D) { std::memcpy(group + lane * D, v, size_t(D) * sizeof(float)); }
inline void put_key(bf16* group, int64_t lane, const bf16* k, int64_t D) {
  for (int64_t d = 0; d < D; d += 2) std::memcpy(group + d * W + lane * 2, k + d, 4);
}
inline void put_value(bf16* group, int64_t lane, const bf16* v, int64_t D) {
  bf16* row = group + lane / 2 * 2 * D + lane % 2;
  for (int64_t d = 0; d < D; ++d) row[2 * d] = v[d];
}

// Vectors of a block of R rows: as many as stay in registers, in bf16 with both halves of the words.
#if defined(VIME_AVX512)
template <int R, class T> constexpr int VECTORS = ELEMENTS<T> == 2 && R > 4 ? 2 : 4;
#else
template <int R, class T> constexpr int VECTORS = 1;
#endif

// s[R][G * 16] = q[R][D] K^T for G groups of keys.
template <int R, int G, class T>
inline void score_block(int64_t D, const float* q, int64_t ldq, const T* const* keys, float* s) {
  F16 sum[R][G];
  const T* k[G];
  each<R>(VIME_DO(r) { each<G>(VIME_DO(g) { sum[r][g] = zero(); }); });
  each<G>(VIME_DO(g) { k[g] = keys[g]; });
  auto add = [&](const float* column, const F16* kv) __attribute__((always_inline)) {
    each<R>(VIME_DO(r) {
      const F16 qv = set1(column[r * ldq]);
      each<G>(VIME_DO(g) { sum[r][g] = fma(qv, kv[g], sum[r][g]); });
    });
  };
  for (int64_t d = 0; d < D; d += ELEMENTS<T>) {
    F16 kv[G];
    if constexpr (ELEMENTS<T> == 1) {
      each<G>(VIME_DO(g) { kv[g] = load(k[g] + d * W); });
      add(q + d, kv);
    } else {
      each<2>(VIME_DO(part) {
        each<G>(VIME_DO(g) { kv[g] = half_of<part>(load_words(k[g] + d * W)); });
        add(q + d + part, kv);
      });
    }
  }
  each<R>(VIME_DO(r) { each<G>(VIME_DO(g) { store(s + r * TILE + g * W, sum[r][g]); }); });
}
template <int R, class T>
inline void score_rows(int64_t D, int groups, const float* q, int64_t ldq, const Tile<T>& t, float* s) {
  constexpr int G = VECTORS<R, T>;
  int g = 0;
  for (; g + G <= groups; g += G) score_block<R, G>(D, q, ldq, t.keys + g, s + g * W);
  for (; g < groups; ++g) score_block<R, 1>(D, q, ldq, t.keys + g, s + g * W);
}

// o[R][width] = alpha o + p[R][n] V over C vectors of head dimensions from d; Whole: width is C vectors. alpha null: 1.
template <int R, int C, bool Whole, class T>
inline void weigh_block(int64_t n, int64_t D, int64_t width, const float* p, int64_t ldp, const T* const* v, int64_t d, float* o, const float* alpha) {
  F16 sum[R][C];
  auto left = [&](int c) __attribute__((always_inline)) { return Whole ? int64_t(W) : width - c * W; };
  each<R>(VIME_DO(r) { each<C>(VIME_DO(c) { sum[r][c] = load_upto(o + r * D + d + c * W, left(c)); }); });
  if (alpha) each<R>(VIME_DO(r) { each<C>(VIME_DO(c) { sum[r][c] = sum[r][c] * set1(alpha[r]); }); });
  auto add = [&](const float* column, const F16* vv) __attribute__((always_inline)) {
    each<R>(VIME_DO(r) {
      const F16 pv = set1(column[r * ldp]);
      each<C>(VIME_DO(c) { sum[r][c] = fma(pv, vv[c], sum[r][c]); });
    });
  };
  for (int64_t first = 0; first < n; first += W) {
    const T* row = v[first / W] + d * ELEMENTS<T>;
    const int64_t stop = std::min<int64_t>(W, n - first);
    const float* column = p + first;
    for (int64_t key = 0; key + ELEMENTS<T> <= stop; key += ELEMENTS<T>, row += D * ELEMENTS<T>) {
      F16 vv[C];
      if constexpr (ELEMENTS<T> == 1) {
        each<C>(VIME_DO(c) { vv[c] = load_upto(row + c * W, left(c)); });
        add(column + key, vv);
      } else {
        each<2>(VIME_DO(part) {
          each<C>(VIME_DO(c) { vv[c] = half_of<part>(load_words_upto(row + 2 * c * W, left(c))); });
          add(column + key + part, vv);
        });
      }
    }
    if constexpr (ELEMENTS<T> == 2) if (stop % 2) {  // the neighbour of the last key may never have been written
      F16 vv[C];
      each<C>(VIME_DO(c) { vv[c] = half_of<0>(load_words_upto(row + 2 * c * W, left(c))); });
      add(column + stop - 1, vv);
    }
  }
  each<R>(VIME_DO(r) { each<C>(VIME_DO(c) { store_upto(o + r * D + d + c * W, sum[r][c], left(c)); }); });
}
template <int R, class T>
inline void weigh_rows(int64_t D, int64_t n, const float* p, int64_t ldp, const Tile<T>& t, float* o, const float* alpha) {
  int64_t d = 0;
  constexpr int C = VECTORS<R, T>;
  for (; d + C * W <= D; d += C * W) weigh_block<R, C, true>(n, D, C * W, p, ldp, t.values, d, o, alpha);
  for (; d < D; d += W) weigh_block<R, 1, false>(n, D, D - d, p, ldp, t.values, d, o, alpha);
}

// Calls f<R>(first row) for blocks of six rows and the rest; seven to eleven are cut in halves, which fill registers better
// than six and one.
template <class F>
inline void row_blocks(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 12 <= rows || r + 6 == rows; r += 6) f.template operator()<6>(r);
  if (rows - r > 6) {
    switch ((rows - r + 1) / 2) {
      case 6: f.template operator()<6>(r), r += 6; break;
      case 5: f.template operator()<5>(r), r += 5; break;
      default: f.template operator()<4>(r), r += 4;
    }
  }
  switch (rows - r) {
    case 5: return f.template operator()<5>(r);
    case 4: return f.template operator()<4>(r);
    case 3: return f.template operator()<3>(r);
    case 2: return f.template operator()<2>(r);
    case 1: return f.template operator()<1>(r);
    default: return;
  }
}
// s[rows][64] = q[rows][D] K^T, for the first `groups` groups of keys.
template <class T>
inline void scores(int64_t rows, int64_t D, int groups, const float* q, int64_t ldq, const Tile<T>& t, float* s) {
  row_blocks(rows, [&]<int R>(int64_t r) { score_rows<R>(D, groups, q + r * ldq, ldq, t, s + r * TILE); });
}
// o[rows][D] = alpha[rows] o + p[rows][n] V, keys in rising order; alpha null: 1.
template <class T>
inline void weigh(int64_t rows, int64_t D, int64_t n, const float* p, int64_t ldp, const Tile<T>& t, float* o, const float* alpha = nullptr) {
  row_blocks(rows, [&]<int R>(int64_t r) { weigh_rows<R>(D, n, p + r * ldp, ldp, t, o + r * D, alpha ? alpha + r : nullptr); });
}

}  // namespace vime
