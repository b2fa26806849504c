// RMSNorm, rotary embedding, SiLU-and-multiply, and their backwards; the backward of the embedding.
#include <memory>

#include "kernels.h"

namespace vime {
namespace {


// Lanes k mod 64 as four vectors, so that the sum is not bound by latency; folded 0+1, 2+3, then both.
inline float fold(const F16* s) { return hsum((s[0] + s[1]) + (s[2] + s[3])); }

}  // namespace

template <class T>
void rms_norm(int64_t rows, int64_t H, const T* x, int64_t ldx, const T* residual, int64_t ldr, const T* w, float eps, T* residual_out, T* y) {
  parallel(rows, grain(H), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* in = x + r * ldx;
      F16 squares[4] = {zero(), zero(), zero(), zero()};
      if (residual) {
        const T* res = residual + r * ldr;
        T* out = residual_out + r * H;
        vectors4(H, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) {
          F16 v = round_to<T>(load_upto(in + k, n) + load_upto(res + k, n));
          store_upto(out + k, v, n);
          squares[i] = fma(v, v, squares[i]);
        });
        in = out;
      } else {
        vectors4(H, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) { F16 v = load_upto(in + k, n); squares[i] = fma(v, v, squares[i]); });
      }
      const F16 scale = set1(1.f / std::sqrt(fold(squares) / float(H) + eps));
      T* to = y + r * H;
      vectors(H, [&](int64_t k, int64_t n) { store_upto(to + k, load_upto(in + k, n) * scale * load_upto(w + k, n), n); });
    }
  });
}

// With s = 1/sqrt(mean(x^2) + eps): dx = s (dy w) - x s^3 / H sum(dy w x); dw = sum over rows of dy x s, in row order.
template <class T>
void rms_norm_backward(int64_t rows, int64_t H, const T* x, const T* w, const T* dy, float eps, T* dx, T* dw) {
  std::unique_ptr<float[]> scales(new float[size_t(rows) + 1]);
  parallel(rows, grain(H), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *in = x + r * H, *g = dy + r * H;
      F16 squares[4] = {zero(), zero(), zero(), zero()}, dot[4] = {zero(), zero(), zero(), zero()};
      vectors4(H, [&](auto i, int64_t k, int64_t n) __attribute__((always_inline)) {
        F16 v = load_upto(in + k, n);
        squares[i] = fma(v, v, squares[i]);
        dot[i] = fma(load_upto(g + k, n) * load_upto(w + k, n), v, dot[i]);
      });
      const float s = 1.f / std::sqrt(fold(squares) / float(H) + eps);
      scales[size_t(r)] = s;
      const F16 a = set1(s), b = set1(-fold(dot) / float(H) * s * s * s);
      vectors(H, [&](int64_t k, int64_t n) {
        F16 gw = load_upto(g + k, n) * load_upto(w + k, n);
        store_upto(dx + r * H + k, fma(load_upto(in + k, n), b, gw * a), n);
      });
    }
  });
  parallel((H + W - 1) / W, grain(rows * W), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin * W; k < std::min(end * W, H); k += W) {
      const int64_t n = H - k;
      F16 sum = zero();
      for (int64_t r = 0; r < rows; ++r)
        sum = fma(load_upto(dy + r * H + k, n), load_upto(x + r * H + k, n) * set1(scales[size_t(r)]), sum);
      store_upto(dw + k, sum, n);
    }
  });
}

// sign = -1 rotates back, which is the backward.
template <class T>
void apply_rope(int64_t tokens, int64_t heads, int64_t D, int64_t R, const T* x, int64_t ldt, int64_t ldh, const float* cos, const float* sin, bool interleaved, float sign, T* y) {
  parallel(tokens, grain(heads * D), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *c = cos + t * R, *s = sin + t * R;
      for (int64_t h = 0; h < heads; ++h) {
        const T* in = x + t * ldt + h * ldh;
        T* out = y + (t * heads + h) * D;
        if (interleaved) {
          for (int64_t i = 0; i < R; ++i) {
            const float a = to_float(in[2 * i]), b = to_float(in[2 * i + 1]), si = s[i] * sign;
            put(out + 2 * i, a * c[i] - b * si);
            put(out + 2 * i + 1, b * c[i] + a * si);
          }
        } else {
          vectors(R, [&](int64_t i, int64_t n) {
            F16 a = load_upto(in + i, n), b = load_upto(in + R + i, n), ci = load_upto(c + i, n), si = load_upto(s + i, n) * set1(sign);
            store_upto(out + i, a * ci - b * si, n);
            store_upto(out + R + i, b * ci + a * si, n);
          });
        }
        if (2 * R < D) std::memcpy(out + 2 * R, in + 2 * R, size_t(D - 2 * R) * sizeof(T));
      }
    }
  });
}

void rope_table(int64_t tokens, int64_t R, const int64_t* positions, const double* frequencies, float* cos, float* sin) {
  parallel(tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < R; ++i) {
        const double angle = double(positions[t]) * frequencies[i];
        cos[t * R + i] = float(std::cos(angle));
        sin[t * R + i] = float(std::sin(angle));
      }
  });
}

template <class T>
void silu_and_mul(int64_t rows, int64_t F, const T* x, int64_t ldx, T* y) {
  const int64_t chunk = 1024, chunks = (F + chunk - 1) / chunk;
  parallel(rows * chunks, grain(chunk), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / chunks, start = task % chunks * chunk, stop = std::min(start + chunk, F);
      const T *g = x + r * ldx, *u = g + F;
      vectors(stop - start, [&](int64_t i, int64_t n) {
        const int64_t k = start + i;
        F16 gate = load_upto(g + k, n);
        store_upto(y + r * F + k, gate / (set1(1.f) + exp(zero() - gate)) * load_upto(u + k, n), n);
      });
    }
  });
}

// With p = 1/(1 + exp(-g)): dg = dy u p (1 + g (1 - p)), du = dy g p.
template <class T>
void silu_and_mul_backward(int64_t rows, int64_t F, const T* x, const T* dy, T* dx) {
  parallel(rows, grain(F), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *g = x + r * 2 * F, *u = g + F;
      T *dg = dx + r * 2 * F, *du = dg + F;
      vectors(F, [&](int64_t k, int64_t n) {
        F16 gate = load_upto(g + k, n), d = load_upto(dy + r * F + k, n), one = set1(1.f);
        F16 p = one / (one + exp(zero() - gate));
        store_upto(dg + k, d * load_upto(u + k, n) * p * fma(gate, one - p, one), n);
        store_upto(du + k, d * gate * p, n);
      });
    }
  });
}

// Returns the first row whose id is outside the vocabulary, or -1 (then y is complete).
template <class T>
int64_t embedding(int64_t tokens, int64_t H, int64_t V, const int64_t* ids, const T* w, T* y) {
  for (int64_t t = 0; t < tokens; ++t) if (ids[t] < 0 || ids[t] >= V) return t;
  parallel(tokens, grain(H), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(y + t * H, w + ids[t] * H, size_t(H) * sizeof(T));
  });
  return -1;
}

// sorted_ids ascending, order the rows of dy they came from (stable). dw is zero on entry.
template <class T>
void embedding_backward(int64_t tokens, int64_t H, const int64_t* sorted_ids, const int64_t* order, const T* dy, T* dw) {
  parallel(tokens, grain(H), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i > 0 && sorted_ids[i] == sorted_ids[i - 1]) continue;  // its run belongs to whoever has the first
      int64_t stop = i + 1;
      while (stop < tokens && sorted_ids[stop] == sorted_ids[i]) ++stop;
      T* out = dw + sorted_ids[i] * H;
      for (int64_t k = 0; k < H; k += W) {
        F16 sum = load_upto(dy + order[i] * H + k, H - k);
        for (int64_t j = i + 1; j < stop; ++j) sum = sum + load_upto(dy + order[j] * H + k, H - k);
        store_upto(out + k, sum, H - k);
      }
    }
  });
}

#define VIME_BOTH(T) \
  template void rms_norm(int64_t, int64_t, const T*, int64_t, const T*, int64_t, const T*, float, T*, T*); \
  template void rms_norm_backward(int64_t, int64_t, const T*, const T*, const T*, float, T*, T*); \
  template void apply_rope(int64_t, int64_t, int64_t, int64_t, const T*, int64_t, int64_t, const float*, const float*, bool, float, T*); \
  template void silu_and_mul(int64_t, int64_t, const T*, int64_t, T*); \
  template void silu_and_mul_backward(int64_t, int64_t, const T*, const T*, T*); \
  template int64_t embedding(int64_t, int64_t, int64_t, const int64_t*, const T*, T*); \
  template void embedding_backward(int64_t, int64_t, const int64_t*, const int64_t*, const T*, T*);
VIME_BOTH(float)
VIME_BOTH(bf16)

}  // namespace vime
