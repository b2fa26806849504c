// Backward of packed attention, by the explicit formulas, tile by tile; nothing of size tokens x tokens is stored.
//
//   P = exp(scale S - lse), dV = P^T dO, dP = dO V^T, dS = scale P (dP - rowsum(dO O)), dQ = dS K, dK = dS^T Q
//
// A unit is one sequence and one key group; its additions run over key tiles, heads and query blocks in a fixed order.
#include <atomic>
#include <vector>

#include "attention_tile.h"

namespace vime {
namespace {

constexpr int64_t BLOCK = 48;  // query rows of one head

using Floats = std::vector<float>;

// 64 keys from x, laid out as keys or as values.
Tile<float> tile_of(const float* x, int64_t D) {
  Tile<float> t;
  for (int64_t g = 0; g < GROUPS; ++g) t.keys[g] = t.values[g] = x + g * W * D;
  return t;
}
// K [n][D] (row stride ld) to groups of 16 keys [D][16] in fp32; keys beyond n are zeros.
template <class T>
void transpose_keys(int64_t n, int64_t D, const T* k, int64_t ld, float* out) {
  for (int64_t base = 0; base < n; base += W, out += D * W)
    for (int64_t j = 0; j < W; ++j)
      for (int64_t d = 0; d < D; ++d) out[d * W + j] = base + j < n ? to_float(k[(base + j) * ld + d]) : 0.f;
}
template <class T> void widen(int64_t n, int64_t D, const T* x, int64_t ld, float* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < D; d += W) store_upto(out + i * D + d, load_upto(x + i * ld + d, D - d), D - d);
}

template <class T>
void run_unit(const AttentionArgs& a, int64_t b, int64_t g, const T* q, const T* k, const T* v, const T* o, const T* d_o, T* dq, T* dk, T* dv) {
  const int64_t first = a.q_start[b], n = a.q_start[b + 1] - first, D = a.D, share = a.heads / a.groups;
  const int64_t tiles = (n + TILE - 1) / TILE, padded = tiles * TILE;
  Floats kf(size_t(padded * D)), kt(size_t(padded * D)), vt(size_t(padded * D)), dkf(size_t(padded * D)), dvf(size_t(padded * D));
  Floats qf(size_t(n * D)), gf(size_t(n * D)), dqf(size_t(n * D)), delta(static_cast<size_t>(n));
  Floats p(BLOCK * TILE), ds(BLOCK * TILE), pt(TILE * BLOCK), dst(TILE * BLOCK);
  widen(n, D, k + first * a.kv_ldt + g * a.kv_ldg, a.kv_ldt, kf.data());
  transpose_keys(n, D, k + first * a.kv_ldt + g * a.kv_ldg, a.kv_ldt, kt.data());
  transpose_keys(n, D, v + first * a.v_ldt + g * a.v_ldg, a.v_ldt, vt.data());
  for (int64_t h = g * share; h < (g + 1) * share; ++h) {
    widen(n, D, q + first * a.q_ldt + h * a.q_ldh, a.q_ldt, qf.data());
    widen(n, D, d_o + (first * a.heads + h) * D, a.heads * D, gf.data());
    std::fill(dqf.begin(), dqf.end(), 0.f);
    for (int64_t i = 0; i < n; ++i) {
      F16 sum = zero();
      const T* row = o + ((first + i) * a.heads + h) * D;
      for (int64_t d = 0; d < D; d += W) sum = fma(load_upto(row + d, D - d), load_upto(&gf[size_t(i * D + d)], D - d), sum);
      delta[size_t(i)] = hsum(sum);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t start = t * TILE, keys = std::min(TILE, n - start);
      const int groups = int((keys + W - 1) / W);
      for (int64_t r0 = a.causal ? start / BLOCK * BLOCK : 0; r0 < n; r0 += BLOCK) {
        const int64_t rows = std::min(BLOCK, n - r0);
        scores(rows, D, groups, &qf[size_t(r0 * D)], D, tile_of(&kt[size_t(start * D)], D), p.data());
        scores(rows, D, groups, &gf[size_t(r0 * D)], D, tile_of(&vt[size_t(start * D)], D), ds.data());
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t seen = std::min(keys, a.causal ? r0 + r + 1 - start : keys);
          const F16 lse = set1(a.lse[(first + r0 + r) * a.heads + h]), dr = set1(delta[size_t(r0 + r)]), scale = set1(a.scale);
          for (int64_t c = 0; c < GROUPS; ++c) {
            const int64_t left = seen - c * W;
            float *pp = &p[size_t(r * TILE + c * W)], *dd = &ds[size_t(r * TILE + c * W)];
            F16 pv = zero(), dv_ = zero();
            if (left > 0) {
              pv = first_n(int(std::min<int64_t>(left, W)), exp(load(pp) * scale - lse), zero());
              dv_ = first_n(int(std::min<int64_t>(left, W)), scale * pv * (load(dd) - dr), zero());
            }
            store(pp, pv), store(dd, dv_);
          }
          for (int64_t key = 0; key < keys; ++key)
            pt[size_t(key * BLOCK + r)] = p[size_t(r * TILE + key)], dst[size_t(key * BLOCK + r)] = ds[size_t(r * TILE + key)];
        }
        weigh(rows, D, keys, ds.data(), TILE, tile_of(&kf[size_t(start * D)], D), &dqf[size_t(r0 * D)]);
        weigh(keys, D, rows, pt.data(), BLOCK, tile_of(&gf[size_t(r0 * D)], D), &dvf[size_t(start * D)]);
        weigh(keys, D, rows, dst.data(), BLOCK, tile_of(&qf[size_t(r0 * D)], D), &dkf[size_t(start * D)]);
      }
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t d = 0; d < D; d += W) store_upto(dq + ((first + i) * a.heads + h) * D + d, load_upto(&dqf[size_t(i * D + d)], D - d), D - d);
  }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < D; d += W) {
      store_upto(dk + ((first + i) * a.groups + g) * D + d, load_upto(&dkf[size_t(i * D + d)], D - d), D - d);
      store_upto(dv + ((first + i) * a.groups + g) * D + d, load_upto(&dvf[size_t(i * D + d)], D - d), D - d);
    }
}

}  // namespace

template <class T>
void attention_backward(const AttentionArgs& a, const T* q, const T* k, const T* v, const T* o, const T* d_o, T* dq, T* dk, T* dv) {
  const int64_t units = a.sequences * a.groups;
  std::atomic<int64_t> next{0};
  int64_t work = 0;
  for (int64_t b = 0; b < a.sequences; ++b) work += a.heads * int64_t(a.q_start[b + 1] - a.q_start[b]) * (a.q_start[b + 1] - a.q_start[b]) * a.D * 5;
  parallel(std::min({int64_t(threads()), units, 1 + work / THREAD_WORK}), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < units;)
      if (a.q_start[i / a.groups + 1] > a.q_start[i / a.groups]) run_unit(a, i / a.groups, i % a.groups, q, k, v, o, d_o, dq, dk, dv);
  });
}
template void attention_backward(const AttentionArgs&, const float*, const float*, const float*, const float*, const float*, float*, float*, float*);
template void attention_backward(const AttentionArgs&, const bf16*, const bf16*, const bf16*, const bf16*, const bf16*, bf16*, bf16*, bf16*);

}  // namespace vime
