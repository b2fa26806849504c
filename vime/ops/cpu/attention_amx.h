// The two products of a tile on AMX, for bf16 and head dimensions that are multiples of 32.
//
// Products are exact in fp32 and added in the order of TDPBF16PS, 32 along the reduction at a time; probabilities are
// rounded to bf16 for the second product (their sum is taken before). A row's order does not depend on other rows.
#pragma once
#include "attention_tile.h"

#if defined(__AMX_BF16__)
namespace vime {

struct alignas(64) AttentionTiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
  // C in 0 to 3, A in 4 (both `rows` high), B in 5 and 6.
  explicit AttentionTiles(int height) {
    for (int t = 0; t < 7; ++t) colsb[t] = 64, rows[t] = uint8_t(t < 5 ? height : 16);
    _tile_loadconfig(this);
  }
  ~AttentionTiles() { _tile_release(); }
};

// s[16][64] = q[16][D] K^T.
inline void amx_scores(int64_t D, const bf16* q, const Tile<bf16>& t, float* s) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int64_t d = 0; d < D; d += 32) {
    _tile_loadd(4, q + d, D * 2);
    _tile_loadd(5, t.keys[0] + d * W, 64); _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, t.keys[1] + d * W, 64); _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, t.keys[2] + d * W, 64); _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, t.keys[3] + d * W, 64); _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, s, TILE * 4); _tile_stored(1, s + 16, TILE * 4);
  _tile_stored(2, s + 32, TILE * 4); _tile_stored(3, s + 48, TILE * 4);
}

// o[16][D] += p[16][64] V; v holds `halves` runs of 32 keys [16][D][2].
inline void amx_weigh(int64_t D, int halves, const bf16* p, const bf16* const* v, float* o) {
  for (int64_t d = 0; d < D; d += 32) {
    _tile_loadd(0, o + d, D * 4); _tile_loadd(1, o + d + 16, D * 4);
    for (int h = 0; h < halves; ++h) {
      _tile_loadd(4, p + h * 32, TILE * 2);
      _tile_loadd(5, v[h] + 2 * d, D * 4); _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, v[h] + 2 * (d + 16), D * 4); _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, o + d, D * 4); _tile_stored(1, o + d + 16, D * 4);
  }
}

// The first n values of a tile as runs of 32 keys: where they lie, if the run is whole and in one piece, else a copy
// with zeros in the place of keys that may never have been written.
inline void gather_values(int64_t D, int64_t n, const Tile<bf16>& t, bf16* copy, const bf16** runs) {
  for (int h = 0; h * 32 < n; ++h, copy += 32 * D) {
    const bf16 *a = t.values[2 * h], *b = t.values[2 * h + 1];
    const int64_t left = n - h * 32;
    if (left >= 32 && b == a + 16 * D) { runs[h] = a; continue; }
    runs[h] = copy;
    for (int64_t pair = 0; pair < 16; ++pair) {
      bf16* to = copy + pair * 2 * D;
      const bf16* from = (pair < 8 ? a + pair * 2 * D : b + (pair - 8) * 2 * D);
      if (2 * pair >= left) std::memset(to, 0, size_t(D) * 4);
      else std::memcpy(to, from, size_t(D) * 4);
      if (2 * pair + 1 == left) for (int64_t d = 0; d < D; ++d) to[2 * d + 1] = bf16{0};
    }
  }
}

}  // namespace vime
#endif
