// The two inner products of attention on one tile of 64 keys, shared by forward and backward, packed and paged form.
//
// Lanes are keys in the first and head dimensions in the second, so no sum runs across lanes: scores add over d in
// rising order, outputs over keys in rising order, whatever the number of rows in a block.
#pragma once
#include "kernels.h"

namespace vime {

constexpr int64_t TILE = 64;   // keys; part of the contract
constexpr int64_t GROUPS = TILE / W;

template <class T>
struct KeyTile {         // K^T: four groups of 16 keys, each [D][16]
  const T* group[GROUPS];
};
template <class T>
struct ValueTile {       // V: four groups of 16 keys, each [16][D] with a row stride
  const T* group[GROUPS];
  int64_t stride;
};

template <int R, class T>
inline void score_rows(int64_t D, int groups, const float* q, int64_t ldq, const KeyTile<T>& k, float* s) {
#if defined(VIME_AVX512)
  if (groups == GROUPS) {
    F16 sum[R][GROUPS];
    for (int r = 0; r < R; ++r) for (int g = 0; g < GROUPS; ++g) sum[r][g] = zero();
    for (int64_t d = 0; d < D; ++d) {
      F16 kv[GROUPS];
      for (int g = 0; g < GROUPS; ++g) kv[g] = load(k.group[g] + d * W);
      for (int r = 0; r < R; ++r) {
        const F16 qv = set1(q[r * ldq + d]);
        for (int g = 0; g < GROUPS; ++g) sum[r][g] = fma(qv, kv[g], sum[r][g]);
      }
    }
    for (int r = 0; r < R; ++r) for (int g = 0; g < GROUPS; ++g) store(s + r * TILE + g * W, sum[r][g]);
    return;
  }
#endif
  for (int g = 0; g < groups; ++g) {
    F16 sum[R];
    for (int r = 0; r < R; ++r) sum[r] = zero();
    for (int64_t d = 0; d < D; ++d) {
      const F16 kv = load(k.group[g] + d * W);
      for (int r = 0; r < R; ++r) sum[r] = fma(set1(q[r * ldq + d]), kv, sum[r]);
    }
    for (int r = 0; r < R; ++r) store(s + r * TILE + g * W, sum[r]);
  }
}

// s[rows][64] = q[rows][D] K^T, for the first `groups` groups of keys.
template <class T>
inline void scores(int64_t rows, int64_t D, int groups, const float* q, int64_t ldq, const KeyTile<T>& k, float* s) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) score_rows<6>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
  switch (rows - r) {
    case 5: return score_rows<5>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
    case 4: return score_rows<4>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
    case 3: return score_rows<3>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
    case 2: return score_rows<2>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
    case 1: return score_rows<1>(D, groups, q + r * ldq, ldq, k, s + r * TILE);
    default: return;
  }
}

template <int R, int C, class T>
inline void weigh_block(int64_t n, int64_t width, const float* p, int64_t ldp, const ValueTile<T>& v, int64_t d, float* o, int64_t ldo) {
  F16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load_upto(o + r * ldo + d + c * W, width - c * W);
  for (int64_t key = 0; key < n; ++key) {
    const T* row = v.group[key / W] + (key % W) * v.stride + d;
    F16 vv[C];
    for (int c = 0; c < C; ++c) vv[c] = load_upto(row + c * W, width - c * W);
    for (int r = 0; r < R; ++r) {
      const F16 pv = set1(p[r * ldp + key]);
      for (int c = 0; c < C; ++c) sum[r][c] = fma(pv, vv[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store_upto(o + r * ldo + d + c * W, sum[r][c], width - c * W);
}

template <int R, class T>
inline void weigh_rows(int64_t D, int64_t n, const float* p, int64_t ldp, const ValueTile<T>& v, float* o, int64_t ldo) {
  int64_t d = 0;
#if defined(VIME_AVX512)
  for (; d + 4 * W <= D; d += 4 * W) weigh_block<R, 4>(n, 4 * W, p, ldp, v, d, o, ldo);
#else
  for (; d + W <= D; d += W) weigh_block<R, 1>(n, W, p, ldp, v, d, o, ldo);
#endif
  for (; d < D; d += W) weigh_block<R, 1>(n, D - d, p, ldp, v, d, o, ldo);
}

// o[rows][D] += p[rows][n] V, keys in rising order.
template <class T>
inline void weigh(int64_t rows, int64_t D, int64_t n, const float* p, int64_t ldp, const ValueTile<T>& v, float* o, int64_t ldo) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) weigh_rows<6>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
  switch (rows - r) {
    case 5: return weigh_rows<5>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
    case 4: return weigh_rows<4>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
    case 3: return weigh_rows<3>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
    case 2: return weigh_rows<2>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
    case 1: return weigh_rows<1>(D, n, p + r * ldp, ldp, v, o + r * ldo, ldo);
    default: return;
  }
}

// K [n][D] (row stride ld) to groups of 16 keys [D][16] in fp32; keys beyond n are zeros.
template <class T>
inline void transpose_keys(int64_t n, int64_t D, const T* k, int64_t ld, float* out) {
  for (int64_t base = 0; base < n; base += W, out += D * W)
    for (int64_t j = 0; j < W; ++j)
      for (int64_t d = 0; d < D; ++d) out[d * W + j] = base + j < n ? to_float(k[(base + j) * ld + d]) : 0.f;
}

}  // namespace vime
