// Attention over explicitly given rows (sparse MLA), and the score functions of a router.
//
// A query reads the rows its index list names, in that order: dot products over sixteen lanes, softmax in two passes with
// lanes j mod 16 over the list, values added in list order. Nothing depends on how long other lists are.
#include <vector>

#include "sparse.h"

namespace vime {
namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

int64_t listed(const SparseArgs& a, int64_t t) {  // entries before the first -1
  int64_t n = 0;
  while (n < a.slots && a.index[t * a.slots + n] >= 0) ++n;
  return n;
}
template <class T> void widen(const T* x, int64_t n, float* out) {
  for (int64_t d = 0; d < n; d += W) store_upto(out + d, load_upto(x + d, n - d), n - d);
}
template <class T> void gather(const SparseArgs& a, int64_t t, int64_t n, const T* kv, float* out) {
  for (int64_t j = 0; j < n; ++j) widen(kv + a.index[t * a.slots + j] * a.kv_ld, a.D, out + j * a.D);
}
// out[j] = x . rows[j] over `width` lanes; the same order for every j.
void dots(const float* x, const float* rows, int64_t n, int64_t width, int64_t ld, float* out) {
  for (int64_t j = 0; j < n; j += 4) {
    F16 sum[4] = {zero(), zero(), zero(), zero()};
    const int64_t m = std::min<int64_t>(4, n - j);
    for (int64_t d = 0; d < width; d += W) {
      const F16 v = load_upto(x + d, width - d);
      for (int64_t i = 0; i < m; ++i) sum[i] = fma(v, load_upto(rows + (j + i) * ld + d, width - d), sum[i]);
    }
    float four[4];
    hsum4(sum, four);
    std::copy_n(four, m, out + j);
  }
}
// y[0:width] += factor * x[0:width]
inline void add_scaled(float factor, const float* x, int64_t width, float* y) {
  for (int64_t d = 0; d < width; d += W) store_upto(y + d, fma(set1(factor), load_upto(x + d, width - d), load_upto(y + d, width - d)), width - d);
}

}  // namespace

template <class T>
void sparse_attention(const SparseArgs& a, const T* q, const T* kv, T* o) {
  parallel(a.tokens, grain(a.heads * a.slots * a.D), [&](int64_t begin, int64_t end) {
    const int64_t padded = (a.slots + W - 1) / W * W;
    std::vector<float> rows(size_t(a.slots * a.D)), x(size_t(a.D)), s(static_cast<size_t>(padded)), acc(size_t(a.Dv));
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = listed(a, t);
      gather(a, t, n, kv, rows.data());
      for (int64_t h = 0; h < a.heads; ++h) {
        T* out = o + (t * a.heads + h) * a.Dv;
        widen(q + t * a.q_ldt + h * a.q_ldh, a.D, x.data());
        dots(x.data(), rows.data(), n, a.D, a.D, s.data());
        std::fill(s.begin() + n, s.end(), NEG_INF);
        F16 top = set1(NEG_INF), sum = zero();
        for (int64_t j = 0; j < n; j += W) {
          const F16 z = first_n(int(std::min<int64_t>(W, n - j)), load(&s[size_t(j)]) * set1(a.scale), set1(NEG_INF));
          store(&s[size_t(j)], z), top = max(top, z);
        }
        const float m = hmax(top);
        for (int64_t j = 0; j < n; j += W) {
          const F16 p = exp(load(&s[size_t(j)]) - set1(m));
          store(&s[size_t(j)], p), sum = sum + p;
        }
        const float l = hsum(sum);
        std::fill(acc.begin(), acc.end(), 0.f);
        for (int64_t j = 0; j < n; ++j) add_scaled(s[size_t(j)], &rows[size_t(j * a.D)], a.Dv, acc.data());
        for (int64_t d = 0; d < a.Dv; d += W)
          store_upto(out + d, n ? load_upto(&acc[size_t(d)], a.Dv - d) / set1(l) : zero(), a.Dv - d);
        if (a.lse) a.lse[t * a.heads + h] = n ? m + log1(l) : NEG_INF;
      }
    }
  });
}

// P = exp(scale S - lse), dP = dO V^T, dS = scale P (dP - dO O), dQ = dS K; the share of (token, entry) in the
// gradient of its row, summed over heads in order, goes to drows[tokens, slots, D] (zeros past the list).
template <class T>
void sparse_attention_backward(const SparseArgs& a, const T* q, const T* kv, const T* o, const T* d_o, T* dq, float* drows) {
  parallel(a.tokens, grain(a.heads * a.slots * a.D), [&](int64_t begin, int64_t end) {
    std::vector<float> rows(size_t(a.slots * a.D)), x(size_t(a.D)), g(size_t(a.Dv)), y(size_t(a.Dv)), s(size_t(a.slots) + W), dp(size_t(a.slots) + W), dx(size_t(a.D));
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n = listed(a, t);
      gather(a, t, n, kv, rows.data());
      float* shares = drows + t * a.slots * a.D;
      std::fill_n(shares, a.slots * a.D, 0.f);
      for (int64_t h = 0; h < a.heads; ++h) {
        widen(q + t * a.q_ldt + h * a.q_ldh, a.D, x.data());
        widen(d_o + (t * a.heads + h) * a.Dv, a.Dv, g.data());
        widen(o + (t * a.heads + h) * a.Dv, a.Dv, y.data());
        dots(x.data(), rows.data(), n, a.D, a.D, s.data());
        dots(g.data(), rows.data(), n, a.Dv, a.D, dp.data());
        float delta;
        dots(g.data(), y.data(), 1, a.Dv, a.Dv, &delta);
        std::fill(dx.begin(), dx.end(), 0.f);
        for (int64_t j = 0; j < n; ++j) {
          float lanes[W];
          store(lanes, exp(set1(s[size_t(j)] * a.scale - a.lse[t * a.heads + h])));
          const float p = lanes[0], ds = a.scale * p * (dp[size_t(j)] - delta);
          add_scaled(ds, &rows[size_t(j * a.D)], a.D, dx.data());
          add_scaled(ds, x.data(), a.D, shares + j * a.D);
          add_scaled(p, g.data(), a.Dv, shares + j * a.D);
        }
        T* to = dq + (t * a.heads + h) * a.D;
        for (int64_t d = 0; d < a.D; d += W) store_upto(to + d, load_upto(&dx[size_t(d)], a.D - d), a.D - d);
      }
    }
  });
}

void sigmoid(int64_t n, const float* x, float* y) {
  for (int64_t i = 0; i < n; i += W) store_upto(y + i, set1(1.f) / (set1(1.f) + exp(zero() - load_upto(x + i, n - i))), n - i);
}
void exponential(int64_t n, const float* x, float* y) {
  for (int64_t i = 0; i < n; i += W) store_upto(y + i, exp(load_upto(x + i, n - i)), n - i);
}

#define VIME_BOTH(T) \
  template void sparse_attention(const SparseArgs&, const T*, const T*, T*); \
  template void sparse_attention_backward(const SparseArgs&, const T*, const T*, const T*, const T*, T*, float*);
VIME_BOTH(float)
VIME_BOTH(bf16)

}  // namespace vime
