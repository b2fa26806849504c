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

template <int R, int G>
inline void score_block(int64_t D, const float* q, int64_t ldq, const float* const* k, float* s) {
  F16 sum[R][G];
  for (int r = 0; r < R; ++r) for (int g = 0; g < G; ++g) sum[r][g] = zero();
  for (int64_t d = 0; d < D; ++d) {
    F16 kv[G];
    for (int g = 0; g < G; ++g) kv[g] = load(k[g] + d * W);
    for (int r = 0; r < R; ++r) {
      const F16 qv = set1(q[r * ldq + d]);
      for (int g = 0; g < G; ++g) sum[r][g] = fma(qv, kv[g], sum[r][g]);
    }
  }
  for (int r = 0; r < R; ++r) for (int g = 0; g < G; ++g) store(s + r * TILE + g * W, sum[r][g]);
}
template <int R, int G>
inline void score_block(int64_t D, const float* q, int64_t ldq, const bf16* const* k, float* s) {
  F16 sum[R][G];
  for (int r = 0; r < R; ++r) for (int g = 0; g < G; ++g) sum[r][g] = zero();
  for (int64_t d = 0; d < D; d += 2) {
    Pair kv[G];
    for (int g = 0; g < G; ++g) kv[g] = load_pairs(k[g] + d * W);
    for (int r = 0; r < R; ++r) {
      const F16 first = set1(q[r * ldq + d]), second = set1(q[r * ldq + d + 1]);
      for (int g = 0; g < G; ++g) sum[r][g] = fma(second, kv[g].second, fma(first, kv[g].first, sum[r][g]));
    }
  }
  for (int r = 0; r < R; ++r) for (int g = 0; g < G; ++g) store(s + r * TILE + g * W, sum[r][g]);
}
template <int R, class T>
inline void score_rows(int64_t D, int groups, const float* q, int64_t ldq, const Tile<T>& t, float* s) {
#if defined(VIME_AVX512)
  if (groups == GROUPS) return score_block<R, GROUPS>(D, q, ldq, t.keys, s);
#endif
  for (int g = 0; g < groups; ++g) score_block<R, 1>(D, q, ldq, t.keys + g, s + g * W);
}

template <int R, int C>
inline void weigh_block(int64_t n, int64_t D, int64_t width, const float* p, int64_t ldp, const float* const* v, int64_t d, float* o) {
  F16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load_upto(o + r * D + d + c * W, width - c * W);
  for (int64_t key = 0; key < n; ++key) {
    const float* row = v[key / W] + key % W * D + d;
    F16 vv[C];
    for (int c = 0; c < C; ++c) vv[c] = load_upto(row + c * W, width - c * W);
    for (int r = 0; r < R; ++r) {
      const F16 pv = set1(p[r * ldp + key]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(pv, vv[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store_upto(o + r * D + d + c * W, sum[r][c], width - c * W);
}
inline Pair load_pairs_upto(const bf16* p, int64_t n) {
  if (n >= W) return load_pairs(p);
  bf16 t[2 * W] = {};
  std::memcpy(t, p, size_t(n) * 4);
  return load_pairs(t);
}
template <int R, int C>
inline void weigh_block(int64_t n, int64_t D, int64_t width, const float* p, int64_t ldp, const bf16* const* v, int64_t d, float* o) {
  F16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load_upto(o + r * D + d + c * W, width - c * W);
  for (int64_t key = 0; key < n; key += 2) {
    const bf16* row = v[key / W] + key % W * D + 2 * d;
    Pair vv[C];
    for (int c = 0; c < C; ++c) vv[c] = load_pairs_upto(row + 2 * c * W, width - c * W);
    for (int r = 0; r < R; ++r) {
      const F16 first = set1(p[r * ldp + key]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(first, vv[c].first, sum[r][c]);
      if (key + 1 == n) continue;  // its neighbour may never have been written
      const F16 second = set1(p[r * ldp + key + 1]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(second, vv[c].second, sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store_upto(o + r * D + d + c * W, sum[r][c], width - c * W);
}
template <int R, class T>
inline void weigh_rows(int64_t D, int64_t n, const float* p, int64_t ldp, const Tile<T>& t, float* o) {
  int64_t d = 0;
#if defined(VIME_AVX512)
  constexpr int C = sizeof(T) == 2 && R > 4 ? 2 : 4;
#else
  constexpr int C = 1;
#endif
  for (; d + C * W <= D; d += C * W) weigh_block<R, C>(n, D, C * W, p, ldp, t.values, d, o);
  for (; d < D; d += W) weigh_block<R, 1>(n, D, D - d, p, ldp, t.values, d, o);
}

// Calls f<R>(first row) for blocks of six rows and the rest.
template <class F>
inline void row_blocks(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) f.template operator()<6>(r);
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
// o[rows][D] += p[rows][n] V, keys in rising order.
template <class T>
inline void weigh(int64_t rows, int64_t D, int64_t n, const float* p, int64_t ldp, const Tile<T>& t, float* o) {
  row_blocks(rows, [&]<int R>(int64_t r) { weigh_rows<R>(D, n, p + r * ldp, ldp, t, o + r * D); });
}

}  // namespace vime
