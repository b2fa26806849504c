// bf16 GEMM on AMX tiles: y^T = w x^T, so that the weight is the operand that needs no packing.
//
// Per element one fp32 accumulator, K in steps of 32 (two products a lane pair inside TDPBF16PS), in rising order;
// a remainder of K is padded with zeros. x is packed once per call into 16-column tiles.
#include "kernels.h"

#if defined(__AMX_BF16__)
#include <vector>

namespace vime {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

struct Tiles {  // all eight tiles 16 rows of 64 bytes, for the life of the object on this thread
  Tiles() {
    TileConfig c;
    for (int t = 0; t < 8; ++t) c.colsb[t] = 64, c.rows[t] = 16;
    _tile_loadconfig(&c);
  }
  ~Tiles() { _tile_release(); }
};

// 16 rows of x, 32 elements each from k, as one B tile: word [k pair][row].
void pack_tile(const bf16* x, int64_t ldx, int64_t rows, int64_t left, uint32_t* out) {
  __m512i r[16];
  const __mmask32 mask = left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1;
  for (int i = 0; i < 16; ++i) r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * ldx) : _mm512_setzero_si512();
  transpose16(r);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(out + i * 16, r[i]);
}

// A C tile (16 columns n of y by 16 rows m) to y.
inline void write_tile(const float* c, int64_t rows, int64_t cols, bf16* y, int64_t ldy) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(c + i * 16);
  transpose16(r);
  const __mmask16 mask = cols >= 16 ? 0xFFFF : (1u << cols) - 1;
  for (int64_t i = 0; i < std::min<int64_t>(rows, 16); ++i)
    _mm256_mask_storeu_epi16(y + i * ldy, mask, round_bf16(_mm512_castsi512_ps(r[i])));
}

// 32 columns of y (A: weights) by 16 * MT rows (B: packed x).
template <int MT>
inline void tile_block(int64_t steps, const uint8_t* const* a, const int64_t* a_stride, const uint32_t* b, int64_t b_stride, float* c) {
  _tile_zero(0); _tile_zero(1);
  if (MT == 2) { _tile_zero(2); _tile_zero(3); }
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t part = s < steps - 1 ? 0 : 1;  // the last step may read the zero-padded copy
    const int64_t off = part ? 0 : s * 64;
    _tile_loadd(6, b + s * 256, 64);
    _tile_loadd(4, a[part] + off, a_stride[part]);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a[part] + off + 16 * a_stride[part], a_stride[part]);
    _tile_dpbf16ps(1, 5, 6);
    if (MT == 2) {
      _tile_loadd(7, b + b_stride + s * 256, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  if (MT == 2) { _tile_stored(2, c + 512, 64); _tile_stored(3, c + 768, 64); }
}

}  // namespace

const char* gemm_kind(bf16) { return "amx-bf16"; }

void gemm(int64_t M, int64_t N, int64_t K, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, bf16* y, int64_t ldy) {
  const int64_t steps = std::max<int64_t>((K + 31) / 32, 1), mtiles = (M + 15) / 16, slabs = (N + 31) / 32;
  const int64_t mtile_words = steps * 256;
  uint32_t* packed = static_cast<uint32_t*>(std::aligned_alloc(64, size_t(mtiles * mtile_words * 4)));
  parallel(mtiles, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t s = 0; s < steps; ++s)
        pack_tile(x + t * 16 * ldx + s * 32, ldx, M - t * 16, K - s * 32, packed + t * mtile_words + s * 256);
  });
  // Rows in groups whose packed form stays in the second-level cache while the weights pass by.
  const int64_t group = std::max<int64_t>(4, 524288 / (mtile_words * 4)) / 2 * 2, groups = (mtiles + group - 1) / group;
  parallel(groups * slabs, 1, [&](int64_t begin, int64_t end) {
    Tiles tiles;
    alignas(64) float c[1024];
    alignas(64) bf16 edge[32 * 32];
    std::vector<bf16> slab;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task % slabs * 32, first = task / slabs * group, stop = std::min(first + group, mtiles);
      const int64_t cols = std::min<int64_t>(32, N - n);
      const bf16* base = w + n * ldw;
      int64_t stride = ldw;
      if (cols < 32) {  // the last columns: a zero-padded copy, so that no row beyond the weight is read
        slab.assign(size_t(32 * steps * 32), bf16{0});
        for (int64_t i = 0; i < cols; ++i) std::memcpy(&slab[size_t(i * steps * 32)], base + i * ldw, size_t(K) * 2);
        base = slab.data(), stride = steps * 32;
      }
      const uint8_t* a[2] = {reinterpret_cast<const uint8_t*>(base), reinterpret_cast<const uint8_t*>(base + (steps - 1) * 32)};
      int64_t strides[2] = {stride * 2, stride * 2};
      if (K % 32 && cols == 32) {
        std::memset(edge, 0, sizeof edge);
        const int64_t left = K - (steps - 1) * 32;
        for (int64_t i = 0; i < 32; ++i) std::memcpy(edge + i * 32, base + i * ldw + (steps - 1) * 32, size_t(left) * 2);
        a[1] = reinterpret_cast<const uint8_t*>(edge), strides[1] = 64;
      }
      for (int64_t t = first; t < stop; t += 2) {
        const uint32_t* b = packed + t * mtile_words;
        const int pair = t + 1 < stop ? 2 : 1;
        if (pair == 2) tile_block<2>(steps, a, strides, b, mtile_words, c);
        else tile_block<1>(steps, a, strides, b, mtile_words, c);
        for (int p = 0; p < pair; ++p)
          for (int h = 0; h < 2 && h * 16 < cols; ++h)
            write_tile(c + p * 512 + h * 256, M - (t + p) * 16, cols - h * 16, y + (t + p) * 16 * ldy + n + h * 16, ldy);
      }
    }
  });
  std::free(packed);
}

}  // namespace vime
#endif
