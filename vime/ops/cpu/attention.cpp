// Forward attention: online softmax over tiles of 64 keys that start at multiples of 64 positions of the sequence.
#include <atomic>
#include <memory>
#include <vector>

#include "attention_tile.h"

namespace vime {
namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr int64_t ROWS = 48;  // query rows (tokens x heads of a group) that share a pass over the keys

struct Unit { int64_t b, g, first, tokens; };  // queries [first, first + tokens) of sequence b, key group g

std::vector<Unit> plan(const AttentionArgs& a) {
  const int64_t share = a.heads / a.groups, step = std::max<int64_t>(1, ROWS / share);
  std::vector<Unit> units;
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int64_t q = a.q_start[b + 1]; q > a.q_start[b];) {  // long rows first: they cost the most
      const int64_t n = std::min<int64_t>(step, q - a.q_start[b]);
      q -= n;
      for (int64_t g = 0; g < a.groups; ++g) units.push_back({b, g, q, n});
    }
  return units;
}

struct Scratch {
  std::vector<float> q, s, o, m, l;
  Scratch(int64_t rows, int64_t D) : q(size_t(rows * D)), s(size_t(rows * TILE)), o(size_t(rows * D)), m(size_t(rows)), l(size_t(rows)) {}
};

// tile(t, keys, values) fills the pointers of key tile t of the unit's sequence.
template <class T, class TK, class Locate>
void run_unit(const AttentionArgs& a, const Unit& u, const T* q, T* o, Scratch& w, const Locate& tile) {
  const int64_t share = a.heads / a.groups, D = a.D, rows = u.tokens * share, kv_len = a.kv_len[u.b];
  const int64_t offset = kv_len - (a.q_start[u.b + 1] - a.q_start[u.b]) - a.q_start[u.b];  // row of q -> position
  for (int64_t r = 0; r < rows; ++r) {
    const T* src = q + (u.first + r / share) * a.q_ldt + (u.g * share + r % share) * a.q_ldh;
    for (int64_t d = 0; d < D; ++d) w.q[size_t(r * D + d)] = to_float(src[d]);
    w.m[size_t(r)] = NEG_INF, w.l[size_t(r)] = 0.f;
  }
  std::fill_n(w.o.begin(), rows * D, 0.f);
  auto visible = [&](int64_t r) { return a.causal ? u.first + r / share + offset + 1 : kv_len; };
  const int64_t last = visible(rows - 1);
  KeyTile<TK> keys;
  ValueTile<T> values;
  for (int64_t start = 0; start < last; start += TILE) {
    const int64_t n = std::min(TILE, last - start);
    int64_t r0 = 0;  // rows that see nothing of this tile come first; they are left alone
    while (visible(r0) <= start) ++r0;
    tile(start, keys, values);
    scores(rows - r0, D, int((n + W - 1) / W), &w.q[size_t(r0 * D)], D, keys, &w.s[size_t(r0 * TILE)]);
    for (int64_t r = r0; r < rows; ++r) {
      float* s = &w.s[size_t(r * TILE)];
      const int64_t seen = visible(r) - start;
      F16 z[GROUPS], top = set1(NEG_INF);
      for (int64_t g = 0; g < GROUPS; ++g) {
        const int64_t left = seen - g * W;
        z[g] = left <= 0 ? set1(NEG_INF) : first_n(int(std::min<int64_t>(left, W)), load(s + g * W) * set1(a.scale), set1(NEG_INF));
        top = max(top, z[g]);
      }
      const float old = w.m[size_t(r)], now = std::max(old, hmax(top));
      F16 p[GROUPS];
      for (int64_t g = 0; g < GROUPS; ++g) p[g] = exp(z[g] - set1(now)), store(s + g * W, p[g]);
      float alpha[W];
      store(alpha, exp(set1(old - now)));
      w.l[size_t(r)] = w.l[size_t(r)] * alpha[0] + hsum((p[0] + p[1]) + (p[2] + p[3]));
      w.m[size_t(r)] = now;
      if (alpha[0] != 1.f)
        for (int64_t d = 0; d < D; ++d) w.o[size_t(r * D + d)] *= alpha[0];
    }
    weigh(rows - r0, D, n, &w.s[size_t(r0 * TILE)], TILE, values, &w.o[size_t(r0 * D)], D);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = u.first + r / share, head = u.g * share + r % share;
    T* dst = o + (token * a.heads + head) * D;
    // + 0 turns a -0 left by a masked key into +0, so that masked keys leave no trace at all.
    for (int64_t d = 0; d < D; d += W) store_upto(dst + d, load_upto(&w.o[size_t(r * D + d)], D - d) / set1(w.l[size_t(r)]) + zero(), D - d);
    if (a.lse) a.lse[token * a.heads + head] = w.m[size_t(r)] + log1(w.l[size_t(r)]);
  }
}

template <class Run>
void run_all(const AttentionArgs& a, const Run& run) {
  const std::vector<Unit> units = plan(a);
  const int64_t rows = std::max<int64_t>(1, ROWS / (a.heads / a.groups)) * (a.heads / a.groups);
  std::atomic<size_t> next{0};
  parallel(std::min<int64_t>(threads(), int64_t(units.size())), 1, [&](int64_t, int64_t) {
    Scratch scratch(rows, a.D);
    for (size_t i; (i = next++) < units.size();) run(units[i], scratch);
  });
}

}  // namespace

template <class T>
void attention_packed(const AttentionArgs& a, const T* q, const T* k, const T* v, T* o) {
  std::vector<int64_t> at(size_t(a.sequences) + 1, 0);  // first group of 16 keys of each sequence
  for (int64_t b = 0; b < a.sequences; ++b) at[size_t(b) + 1] = at[size_t(b)] + (a.kv_len[b] + TILE - 1) / TILE * GROUPS;
  const int64_t per_group = at.back() * W * a.D;
  std::unique_ptr<float[]> kt(new float[size_t(std::max<int64_t>(1, per_group * a.groups))]);
  parallel(a.sequences * a.groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / a.groups, g = i % a.groups;
      transpose_keys(a.kv_len[b], a.D, k + a.kv_start[b] * a.kv_ldt + g * a.kv_ldg, a.kv_ldt, &kt[size_t(g * per_group + at[size_t(b)] * W * a.D)]);
    }
  });
  run_all(a, [&](const Unit& u, Scratch& scratch) {
    const float* keys_of = &kt[size_t(u.g * per_group + at[size_t(u.b)] * W * a.D)];
    const T* values_of = v + a.kv_start[u.b] * a.v_ldt + u.g * a.v_ldg;
    run_unit<T, float>(a, u, q, o, scratch, [&](int64_t start, KeyTile<float>& keys, ValueTile<T>& values) {
      values.stride = a.v_ldt;
      for (int64_t i = 0; i < GROUPS; ++i) {
        keys.group[i] = keys_of + (start + i * W) * a.D;
        values.group[i] = values_of + (start + i * W) * a.v_ldt;
      }
    });
  });
}

// Cache: [block][K, V][group][block_size * D]. K of a block lies in groups of 16 keys [D][16], V as [key][D].
template <class T>
void attention_paged(const AttentionArgs& a, const T* q, const T* cache, T* o) {
  const int64_t page = a.block_size * a.D;
  run_all(a, [&](const Unit& u, Scratch& scratch) {
    run_unit<T, T>(a, u, q, o, scratch, [&](int64_t start, KeyTile<T>& keys, ValueTile<T>& values) {
      values.stride = a.D;
      for (int64_t i = 0; i < GROUPS; ++i) {
        const int64_t position = std::min<int64_t>(start + i * W, (a.kv_len[u.b] - 1) / W * W);  // never past the table
        const int64_t block = a.block_table[u.b * a.ldb + position / a.block_size], offset = position % a.block_size * a.D;
        keys.group[i] = cache + ((block * 2) * a.groups + u.g) * page + offset;
        values.group[i] = cache + ((block * 2 + 1) * a.groups + u.g) * page + offset;
      }
    });
  });
}

template <class T>
void kv_cache_write(int64_t tokens, int64_t groups, int64_t D, int64_t block_size, const T* k, int64_t k_ldt, int64_t k_ldg, const T* v, int64_t v_ldt, int64_t v_ldg, const int64_t* slots, T* cache) {
  parallel(tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (slots[t] < 0) continue;
      const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
      for (int64_t g = 0; g < groups; ++g) {
        T* kc = cache + ((block * 2) * groups + g) * block_size * D + offset / W * W * D + offset % W;
        T* vc = cache + ((block * 2 + 1) * groups + g) * block_size * D + offset * D;
        const T* kt = k + t * k_ldt + g * k_ldg;
        for (int64_t d = 0; d < D; ++d) kc[d * W] = kt[d];
        std::memcpy(vc, v + t * v_ldt + g * v_ldg, size_t(D) * sizeof(T));
      }
    }
  });
}

#define VIME_BOTH(T) \
  template void attention_packed(const AttentionArgs&, const T*, const T*, const T*, T*); \
  template void attention_paged(const AttentionArgs&, const T*, const T*, T*); \
  template void kv_cache_write(int64_t, int64_t, int64_t, int64_t, const T*, int64_t, int64_t, const T*, int64_t, int64_t, const int64_t*, T*);
VIME_BOTH(float)
VIME_BOTH(bf16)

}  // namespace vime
