// Forward attention: online softmax over tiles of 64 keys that start at multiples of 64 positions of the sequence.
//
// One loop serves both forms. The packed form first lays its keys and values out as a cache does.
#include <atomic>
#include <memory>
#include <vector>

#include "attention_amx.h"

namespace vime {
namespace {

constexpr float NEG_INF = -std::numeric_limits<float>::infinity();
constexpr int64_t ROWS = 64;  // query rows (tokens x heads of a group) that share a pass over the keys

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

template <class T>
struct Scratch {  // rows padded to 16
  int64_t rows, D;
  std::vector<float> s, o, m, l, alpha, sum;
  std::vector<float> q;      // lane form
  std::vector<bf16> qb, pb, v;  // matrix form
  Scratch(int64_t most, int64_t D)
      : rows((most + 15) / 16 * 16), D(D), s(size_t(rows * TILE)), o(size_t(rows * D)), m(size_t(rows)), l(size_t(rows)), alpha(size_t(rows)), sum(size_t(rows)) {
    if (matrix()) qb.resize(size_t(rows * D)), pb.resize(size_t(rows * TILE)), v.resize(size_t(TILE * D));
    else q.resize(size_t(rows * D));
  }
  bool matrix() const {
#if defined(__AMX_BF16__)
    return sizeof(T) == 2 && D % 32 == 0;
#else
    return false;
#endif
  }
};

// One step of the online softmax for rows [r0, rows) of w.s: m, l and o are brought up to date, p takes the place of s
// (in bf16 in w.pb for the matrix form). seen(r): keys of the tile that row r may read, 64 or more: all, 0 or less: none.
template <class T, class Seen>
void softmax_step(Scratch<T>& w, int64_t r0, int64_t rows, float scale, bool matrix, const Seen& seen) {
  const F16 factor = set1(scale), none = set1(NEG_INF);
  for (int64_t r = r0; r < rows; ++r) {
    float* s = &w.s[size_t(r * TILE)];
    const int64_t left = seen(r);
    F16 z[GROUPS];
    each<GROUPS>(VIME_DO(g) { z[g] = load(s + g * W) * factor; });
    if (left < TILE) each<GROUPS>(VIME_DO(g) { z[g] = left <= g * W ? none : first_n(int(std::min<int64_t>(left - g * W, W)), z[g], none); });
    each<GROUPS>(VIME_DO(g) { store(s + g * W, z[g]); });
    w.sum[size_t(r)] = hmax(max(max(z[0], z[1]), max(z[2], z[3])));  // for now the maximum
  }
  const int64_t start = r0 / W * W;
  for (int64_t r = start; r < rows; r += W) {
    const F16 old = load(&w.m[size_t(r)]), now = max(load(&w.sum[size_t(r)]), old);
    store(&w.alpha[size_t(r)], exp_down(old - now));
    store(&w.m[size_t(r)], now);
  }
  for (int64_t r = r0; r < rows; r += 4) {
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < 4 && r + i < rows; ++i) {
      float* s = &w.s[size_t((r + i) * TILE)];
      const F16 top = set1(w.m[size_t(r + i)]);
      F16 p[GROUPS];
      for (int64_t g = 0; g < GROUPS; ++g) {
        p[g] = exp_down(load(s + g * W) - top);
        if (matrix) store(&w.pb[size_t((r + i) * TILE + g * W)], p[g]);
        else store(s + g * W, p[g]);
      }
      sums[i] = (p[0] + p[1]) + (p[2] + p[3]);
    }
    float total[4];
    hsum4(sums, total);
    for (int64_t i = 0; i < 4 && r + i < rows; ++i) w.l[size_t(r + i)] = w.l[size_t(r + i)] * w.alpha[size_t(r + i)] + total[i];
  }
  if (!matrix) return;  // weigh() does it
  for (int64_t r = r0; r < rows; ++r) {
    if (w.alpha[size_t(r)] == 1.f) continue;
    const F16 alpha = set1(w.alpha[size_t(r)]);
    float* o = &w.o[size_t(r * w.D)];
    vectors(w.D, [&](int64_t d, int64_t n) { store_upto(o + d, load_upto(o + d, n) * alpha, n); });
  }
}

// locate(start, tile) fills the pointers of the tile at position `start` of the unit's sequence.
template <class T, class Locate>
void run_unit(const AttentionArgs& a, const Unit& u, const T* q, T* o, Scratch<T>& w, const Locate& locate) {
  const int64_t share = a.heads / a.groups, D = a.D, rows = u.tokens * share, kv_len = a.kv_len[u.b];
  const int64_t offset = kv_len - (a.q_start[u.b + 1] - a.q_start[u.b]) - a.q_start[u.b];  // row of q -> position
  const bool matrix = w.matrix();
  for (int64_t r = 0; r < rows; ++r) {
    const T* src = q + (u.first + r / share) * a.q_ldt + (u.g * share + r % share) * a.q_ldh;
    if (matrix) std::memcpy(&w.qb[size_t(r * D)], src, size_t(D) * sizeof(T));
    else for (int64_t d = 0; d < D; ++d) w.q[size_t(r * D + d)] = to_float(src[d]);
  }
  std::fill(w.m.begin(), w.m.end(), NEG_INF);
  std::fill(w.l.begin(), w.l.end(), 0.f);
  std::fill(w.o.begin(), w.o.end(), 0.f);
  auto visible = [&](int64_t r) { return a.causal ? u.first + r / share + offset + 1 : kv_len; };
  const int64_t last = visible(rows - 1);
  Tile<T> tile;
  auto sweep = [&](auto scores_of, auto weigh_of, int64_t round) {
    int64_t r0 = 0;  // rows that see nothing of a tile come first
    for (int64_t start = 0; start < last; start += TILE) {
      const int64_t n = std::min(TILE, last - start);
      while (visible(r0) <= start) ++r0;
      const int64_t from = r0 / round * round;
      locate(start, tile);
      scores_of(from, n);
      softmax_step(w, from, rows, a.scale, matrix, [&](int64_t r) { return visible(r) - start; });
      weigh_of(from, n);
    }
  };
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (matrix) {
      AttentionTiles tiles(int(std::min<int64_t>(rows, 16)));
      std::fill(w.pb.begin(), w.pb.end(), bf16{0});
      const bf16* runs[2];
      sweep([&](int64_t from, int64_t) { for (int64_t r = from; r < rows; r += 16) amx_scores(D, &w.qb[size_t(r * D)], tile, &w.s[size_t(r * TILE)]); },
            [&](int64_t from, int64_t n) {
              gather_values(D, n, tile, w.v.data(), runs);
              for (int64_t r = from; r < rows; r += 16) amx_weigh(D, int((n + 31) / 32), &w.pb[size_t(r * TILE)], runs, &w.o[size_t(r * D)]);
            }, 16);
    }
  }
#endif
  if (!matrix)
    sweep([&](int64_t from, int64_t n) { scores(rows - from, D, int((n + W - 1) / W), &w.q[size_t(from * D)], D, tile, &w.s[size_t(from * TILE)]); },
          [&](int64_t from, int64_t n) { weigh(rows - from, D, n, &w.s[size_t(from * TILE)], TILE, tile, &w.o[size_t(from * D)], &w.alpha[size_t(from)]); }, 1);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = u.first + r / share, head = u.g * share + r % share;
    T* to = o + (token * a.heads + head) * D;
    const float* from = &w.o[size_t(r * D)];
    const F16 l = set1(w.l[size_t(r)]);
    // + 0 turns a -0 left by a masked key into +0, so that masked keys leave no trace at all.
    vectors(D, [&](int64_t d, int64_t n) { store_upto(to + d, load_upto(from + d, n) / l + zero(), n); });
    if (a.lse) a.lse[token * a.heads + head] = w.m[size_t(r)] + log1(w.l[size_t(r)]);
  }
}

template <class T, class Run>
void run_all(const AttentionArgs& a, const Run& run) {
  const std::vector<Unit> units = plan(a);
  const int64_t share = a.heads / a.groups;
  int64_t work = 0;
  for (const Unit& u : units) work += u.tokens * share * a.kv_len[u.b] * a.D * 2;
  std::atomic<size_t> next{0};
  parallel(std::min({int64_t(threads()), int64_t(units.size()), 1 + work / THREAD_WORK}), 1, [&](int64_t, int64_t) {
    Scratch<T> scratch(std::max<int64_t>(1, ROWS / share) * share, a.D);
    for (size_t i; (i = next++) < units.size();) run(units[i], scratch);
  });
}

}  // namespace

template <class T>
void attention_packed(const AttentionArgs& a, const T* q, const T* k, const T* v, T* o) {
  struct Piece { int64_t b, position; };  // a tile of a sequence
  std::vector<Piece> pieces;
  std::vector<int64_t> first(size_t(a.sequences), 0);  // first tile of each sequence
  for (int64_t b = 0; b < a.sequences; ++b) {
    first[size_t(b)] = int64_t(pieces.size());
    for (int64_t p = 0; p < a.kv_len[b]; p += TILE) pieces.push_back({b, p});
  }
  const int64_t words = TILE * a.D;  // keys or values of a tile and a group
  std::unique_ptr<T[]> cache(new T[size_t(std::max<int64_t>(1, int64_t(pieces.size()) * a.groups * 2 * words))]);
  parallel(int64_t(pieces.size()) * a.groups, grain(2 * words), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Piece& piece = pieces[size_t(i / a.groups)];
      const int64_t g = i % a.groups, row = a.kv_start[piece.b] + piece.position, n = std::min(TILE, a.kv_len[piece.b] - piece.position);
      T* to = &cache[size_t(i * 2 * words)];
      for (int64_t j = 0; j < n; ++j) {
        put_key(to + j / W * W * a.D, j % W, k + (row + j) * a.kv_ldt + g * a.kv_ldg, a.D);
        put_value(to + words + j / W * W * a.D, j % W, v + (row + j) * a.v_ldt + g * a.v_ldg, a.D);
      }
    }
  });
  run_all<T>(a, [&](const Unit& u, Scratch<T>& scratch) {
    run_unit<T>(a, u, q, o, scratch, [&](int64_t start, Tile<T>& tile) {
      const T* base = &cache[size_t(((first[size_t(u.b)] + start / TILE) * a.groups + u.g) * 2 * words)];
      for (int64_t i = 0; i < GROUPS; ++i) tile.keys[i] = base + i * W * a.D, tile.values[i] = base + words + i * W * a.D;
    });
  });
}

// Cache: [block][K, V][group][block_size / 16] groups of 16 keys.
template <class T>
void attention_paged(const AttentionArgs& a, const T* q, const T* cache, T* o) {
  const int64_t page = a.block_size * a.D;
  run_all<T>(a, [&](const Unit& u, Scratch<T>& scratch) {
    run_unit<T>(a, u, q, o, scratch, [&](int64_t start, Tile<T>& tile) {
      for (int64_t i = 0; i < GROUPS; ++i) {
        const int64_t position = std::min<int64_t>(start + i * W, (a.kv_len[u.b] - 1) / W * W);  // never past the table
        const int64_t block = a.block_table[u.b * a.ldb + position / a.block_size], offset = position % a.block_size * a.D;
        tile.keys[i] = cache + ((block * 2) * a.groups + u.g) * page + offset;
        tile.values[i] = cache + ((block * 2 + 1) * a.groups + u.g) * page + offset;
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
        T* keys = cache + ((block * 2) * groups + g) * block_size * D + offset / W * W * D;
        put_key(keys, offset % W, k + t * k_ldt + g * k_ldg, D);
        put_value(keys + groups * block_size * D, offset % W, v + t * v_ldt + g * v_ldg, D);
      }
    }
  });
}

const char* attention_kind(float) { return "f32-tile64"; }
#if defined(__AMX_BF16__)
const char* attention_kind(bf16) { return "amx-bf16-tile64"; }
#else
const char* attention_kind(bf16) { return "bf16-tile64"; }
#endif

#define VIME_BOTH(T) \
  template void attention_packed(const AttentionArgs&, const T*, const T*, const T*, T*); \
  template void attention_paged(const AttentionArgs&, const T*, const T*, T*); \
  template void kv_cache_write(int64_t, int64_t, int64_t, int64_t, const T*, int64_t, int64_t, const T*, int64_t, int64_t, const int64_t*, T*);
VIME_BOTH(float)
VIME_BOTH(bf16)

}  // namespace vime
