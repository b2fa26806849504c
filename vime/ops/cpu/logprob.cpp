// Log-softmax over the vocabulary and the log-probability of one id. The sum runs over lanes v mod 64.
#include "kernels.h"

namespace vime {
namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

template <class T>
struct Row {  // z = x / temperature, 16 at a time
  const T* x;
  int64_t V;
  F16 t;
  bool plain;
  Row(const T* x, int64_t V, float temperature) : x(x), V(V), t(set1(temperature)), plain(temperature == 1.f) {}
  F16 z(int64_t k, int64_t n) const { F16 v = load_upto(x + k, n); return plain ? v : v / t; }
};
inline F16 keep(int64_t n, F16 v, F16 other) { return n >= W ? v : first_n(int(n), v, other); }

}  // namespace

template <class T>
void log_softmax(int64_t rows, int64_t V, const T* x, int64_t ldx, const float* temperature, const int64_t* ids, float* out, float* lp, float* max_out, float* logsum_out, float* entropy) {
  parallel(rows, grain(V), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Row<T> row(x + r * ldx, V, temperature[r]);
      F16 m[4];
      for (auto& lane : m) lane = set1(NEG_INF);
      vectors4(V, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) { m[i] = max(m[i], keep(n, row.z(k, n), set1(NEG_INF))); });
      const float top = hmax(max(max(m[0], m[1]), max(m[2], m[3])));
      const F16 shift = set1(top);
      F16 s[4] = {zero(), zero(), zero(), zero()}, h[4] = {zero(), zero(), zero(), zero()};
      vectors4(V, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) {
        F16 d = row.z(k, n) - shift, e = keep(n, exp(d), zero());
        s[i] = s[i] + e;
        if (entropy) h[i] = fma(e, max(set1(-1e30f), d), h[i]);
      });
      const float sum = hsum((s[0] + s[1]) + (s[2] + s[3])), logsum = log1(sum);
      if (max_out) max_out[r] = top, logsum_out[r] = logsum;
      if (entropy) entropy[r] = logsum - hsum((h[0] + h[1]) + (h[2] + h[3])) / sum;
      if (lp) {
        float t[W];
        const int64_t k = ids[r] / W * W;
        store(t, (row.z(k, std::min<int64_t>(W, V - k)) - shift) - set1(logsum));
        lp[r] = t[ids[r] - k];
      }
      if (out) vectors(V, [&](int64_t k, int64_t n) { store_upto(out + r * V + k, (row.z(k, n) - shift) - set1(logsum), n); });
    }
  });
}

// d loss/dx = (g - p sum g) / temperature. With ids, g is one number a row at its id.
template <class T>
void log_softmax_backward(int64_t rows, int64_t V, const T* x, int64_t ldx, const float* temperature, const float* max_in, const float* logsum, const int64_t* ids, const float* g, int64_t ldg, T* dx) {
  parallel(rows, grain(V), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Row<T> row(x + r * ldx, V, temperature[r]);
      const F16 shift = set1(max_in[r]), ls = set1(logsum[r]);
      float total;
      if (ids) {
        total = g[r];
      } else {
        F16 s[4] = {zero(), zero(), zero(), zero()};
        vectors4(V, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) { s[i] = s[i] + load_upto(g + r * ldg + k, n); });
        total = hsum((s[0] + s[1]) + (s[2] + s[3]));
      }
      vectors(V, [&](int64_t k, int64_t n) {
        F16 gk = zero();
        if (!ids) {
          gk = load_upto(g + r * ldg + k, n);
        } else if (ids[r] >= k && ids[r] < k + W) {
          float t[W] = {};
          t[ids[r] - k] = total;
          gk = load(t);
        }
        F16 p = exp((row.z(k, n) - shift) - ls);
        store_upto(dx + r * V + k, (gk - p * set1(total)) / row.t, n);
      });
    }
  });
}

#define VIME_BOTH(T) \
  template void log_softmax(int64_t, int64_t, const T*, int64_t, const float*, const int64_t*, float*, float*, float*, float*, float*); \
  template void log_softmax_backward(int64_t, int64_t, const T*, int64_t, const float*, const float*, const float*, const int64_t*, const float*, int64_t, T*);
VIME_BOTH(float)
VIME_BOTH(bf16)

}  // namespace vime
