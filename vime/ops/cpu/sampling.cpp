// Gumbel-max sampling with Philox4x32-10 (Salmon et al., SC'11): the noise is a function of (seed, position, id).
#include <vector>

#include "kernels.h"

namespace vime {
namespace {

// Words of counters (block .. block + 15, position), 64 consecutive ids.
void philox16(uint32_t block, uint64_t position, uint64_t seed, uint32_t* out) {
  uint32_t c0[16], c1[16], c2[16], c3[16], k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 16; ++i) c0[i] = block + i, c1[i] = uint32_t(position), c2[i] = uint32_t(position >> 32), c3[i] = 0;
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c0[i], p1 = uint64_t(0xCD9E8D57u) * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = uint32_t(p1);
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = uint32_t(p0);
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < 16; ++i) out[4 * i] = c0[i], out[4 * i + 1] = c1[i], out[4 * i + 2] = c2[i], out[4 * i + 3] = c3[i];
}

// -log(-log(1 - v)) with v in (0, 1). log1p below 1/4, so that small v (the likely winners) keep their precision.
F16 gumbel(F16 v) {
  const F16 one = set1(1.f), small = log_reduced(zero() - v, zero()), large = log(one - v);
  F16 e = zero() - where_less(v, set1(0.25f), small, large);
  return zero() - log(e);
}

void add_gumbel(int64_t V, uint64_t seed, uint64_t position, float* scores) {
  uint32_t words[64];
  float u[64];
  for (int64_t v = 0; v < V; v += 64) {
    philox16(uint32_t(v / 4), position, seed, words);
    for (int i = 0; i < 64; ++i) {
      const float x = (float(words[i]) + 0.5f) * 0x1p-32f;
      u[i] = x < 0x1.fffffep-1f ? x : 0x1.fffffep-1f;
    }
    for (int64_t i = 0; i < 64 && v + i < V; i += W) {
      const int64_t n = V - v - i;
      store_upto(scores + v + i, load_upto(scores + v + i, n) + gumbel(load(u + i)), n);
    }
  }
}

int64_t first_largest(const std::vector<float>& x) {
  F16 m = set1(-std::numeric_limits<float>::infinity());
  const int64_t V = int64_t(x.size());
  for (int64_t k = 0; k < V; k += W) m = max(m, V - k >= W ? load(&x[size_t(k)]) : first_n(int(V - k), load_n(&x[size_t(k)], int(V - k)), m));
  const float top = hmax(m);
  for (int64_t k = 0; k < V; ++k) if (x[size_t(k)] == top) return k;
  return -1;
}

// Sorts as (value falling, id rising).
uint64_t sort_key(float x, int64_t id) {
  x += 0.f;  // -0 ties with +0
  uint32_t u; std::memcpy(&u, &x, 4);
  u = u & 0x80000000u ? ~u : u | 0x80000000u;  // order of floats as unsigned
  return uint64_t(~u) << 32 | uint64_t(id);
}

// Ids that top-k, then top-p keep.
std::vector<int64_t> kept_ids(const std::vector<float>& z, int64_t top_k, float top_p) {
  const int64_t V = int64_t(z.size());
  std::vector<uint64_t> keys(z.size());
  for (int64_t v = 0; v < V; ++v) keys[size_t(v)] = sort_key(z[size_t(v)], v);
  int64_t count = top_k > 0 && top_k < V ? top_k : V;
  auto id = [&](int64_t i) { return int64_t(keys[size_t(i)] & 0xFFFFFFFFu); };
  if (count < V) std::nth_element(keys.begin(), keys.begin() + count, keys.end());
  if (top_p < 1.f) {
    const float top = z[size_t(*std::min_element(keys.begin(), keys.begin() + count) & 0xFFFFFFFFu)];
    auto mass = [&](int64_t v) { float t[W]; store(t, exp(set1(z[size_t(v)] - top))); return double(t[0]); };
    std::sort(keys.begin(), keys.begin() + count);
    double total = 0, running = 0;
    for (int64_t i = count - 1; i >= 0; --i) total += mass(id(i));
    int64_t kept = 0;
    while (kept < count) { running += mass(id(kept++)); if (running >= double(top_p) * total) break; }
    count = kept;
  }
  std::vector<int64_t> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out[size_t(i)] = id(i);
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

template <class T>
void sample(int64_t rows, int64_t V, const T* x, int64_t ldx, const int64_t* seed, const int64_t* position, const float* temperature, const int64_t* top_k, const float* top_p, int64_t* out) {
  parallel(rows, grain(V), [&](int64_t begin, int64_t end) {
    std::vector<float> z(static_cast<size_t>(V));
    for (int64_t r = begin; r < end; ++r) {
      bool nan = false;
      const float t = temperature[r];
      for (int64_t v = 0; v < V; ++v) { z[size_t(v)] = to_float(x[r * ldx + v]); nan |= z[size_t(v)] != z[size_t(v)]; }
      if (nan) { out[r] = -1; continue; }
      if (t == 0.f) { out[r] = first_largest(z); continue; }
      if (t != 1.f) for (int64_t v = 0; v < V; ++v) z[size_t(v)] /= t;
      const int64_t k = top_k ? top_k[r] : 0;
      const float p = top_p ? top_p[r] : 1.f;
      if ((k > 0 && k < V) || p < 1.f) {
        const std::vector<int64_t> ids = kept_ids(z, k, p);
        add_gumbel(V, uint64_t(seed[r]), uint64_t(position[r]), z.data());
        int64_t best = ids[0];
        for (int64_t id : ids) if (z[size_t(id)] > z[size_t(best)]) best = id;
        out[r] = best;
      } else {
        add_gumbel(V, uint64_t(seed[r]), uint64_t(position[r]), z.data());
        out[r] = first_largest(z);
      }
    }
  });
}
template void sample(int64_t, int64_t, const float*, int64_t, const int64_t*, const int64_t*, const float*, const int64_t*, const float*, int64_t*);
template void sample(int64_t, int64_t, const bf16*, int64_t, const int64_t*, const int64_t*, const float*, const int64_t*, const float*, int64_t*);

}  // namespace vime
