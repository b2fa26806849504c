// y = x w^T with an order of additions along K that depends on K alone.
//
// Lane form (fp32, and bf16 without matrix instructions): 16 partial sums over k mod 16, each in rising k, folded by
// the tree of hsum. Both operands are read as they lie, so a decode step reads each weight once and packs nothing.
// How rows and columns are grouped into register blocks, panels and threads does not touch the order of any element;
// a panel of K hands its partial sums on through memory, which keeps them as they are.
// The matrix form of bf16 is in gemm_amx.cpp.
#include <atomic>
#include <memory>

#include "gemm_block.h"

namespace vime {
namespace {

// A visit of some rows of x to some columns over one panel of K. Whole: the panel is a multiple of a step.
template <class S, bool Whole>
struct Visit {
  using T = typename S::T;
  const Panel<T>& p;
  int64_t M, N;
  float* carry;

  template <int R>
  void rows(int64_t m) {
    constexpr int step = columns_of(R);
    const int64_t after = m + R;  // whose rows are asked for meanwhile, one a block; past the last: the next panel of the first
    const T* next = after < M ? p.x + after * p.ldx : p.x + p.K;
    const int64_t coming = after < M ? std::min<int64_t>(M - after, MR) : p.last ? 0 : std::min<int64_t>(M, MR);
    int64_t n = 0;
    for (int64_t turn = 0; n + step <= N; n += step, ++turn, carry += R * step * W) {
      const bool cold = m == 0 && n + 2 * step <= N;  // only the first rows meet columns that are not near yet
      block_of<S, R, step, Whole>(p, m, n, carry, {cold ? step * p.ldw : 0, turn < coming ? next + turn * p.ldx : p.w});
    }
    for (; n < N; ++n, carry += R * W) block_of<S, R, 1, Whole>(p, m, n, carry, {0, p.w});
  }
  void run() {
    int64_t m = 0;
    for (; m + MR <= M; m += MR) rows<MR>(m);
    switch (M - m) {
      case 1: return rows<1>(m);
      case 2: return rows<2>(m);
#if defined(VIME_AVX512)
      case 3: return rows<3>(m);
      case 4: return rows<4>(m);
      case 5: return rows<5>(m);
#endif
      default: return;
    }
  }
};

template <class S>
void lane_gemm(int64_t M, int64_t N, int64_t K, const typename S::T* x, int64_t ldx, const typename S::T* w, int64_t ldw, typename S::T* y, int64_t ldy) {
  using T = typename S::T;
  // A panel of MR rows of x and of two blocks of columns fits the first-level cache; one of a task's columns, with the
  // partial sums of its elements, the second.
  const int64_t bytes = K * int64_t(sizeof(T)), panels = M <= 2 || bytes <= 3840 ? 1 : (bytes + 3071) / 3072;
  const int64_t kc = (K + panels * 32 - 1) / (panels * 32) * 32, mc = panels > 1 ? 48 : 240, blocks = (M + mc - 1) / mc;
  const int64_t most = M <= MR || panels > 1 ? 64 : std::max<int64_t>(32, 131072 / bytes), team = threads();
  const int64_t shares = ((N + most - 1) / most + team - 1) / team * team;  // of the columns, alike for every thread
  const int64_t nc = std::max<int64_t>(8, (N + shares * 8 - 1) / (shares * 8) * 8), tasks = (N + nc - 1) / nc * blocks;
  std::atomic<int64_t> next{0};
  parallel(std::min({team, tasks, 1 + M * N * K / THREAD_WORK}), 1, [&](int64_t, int64_t) {
    std::unique_ptr<float[]> carry(panels > 1 ? new float[size_t(mc * nc * W)] : nullptr);
    for (int64_t task; (task = next++) < tasks;) {
      const int64_t m = task % blocks * mc, n = task / blocks * nc, rows = std::min(mc, M - m), columns = std::min(nc, N - n);
      for (int64_t k = 0; k < K; k += kc) {
        const Panel<T> p{std::min(kc, K - k), x + m * ldx + k, ldx, w + n * ldw + k, ldw, y + m * ldy + n, ldy, k == 0, k + kc >= K};
        if (p.K % S::width == 0) Visit<S, true>{p, rows, columns, carry.get()}.run();
        else Visit<S, false>{p, rows, columns, carry.get()}.run();
      }
    }
  });
}

}  // namespace

const char* gemm_kind(float) { return "f32-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy) {
  lane_gemm<StepF32>(M, N, K, x, ldx, w, ldw, y, ldy);
}

#if !defined(__AMX_BF16__)
const char* gemm_kind(bf16) { return StepBF16::width == 32 ? "avx512-bf16" : "bf16-lane16"; }
void gemm(int64_t M, int64_t N, int64_t K, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, bf16* y, int64_t ldy) {
  lane_gemm<StepBF16>(M, N, K, x, ldx, w, ldw, y, ldy);
}
#endif

#if defined(VIME_AVX512)
inline __m512i load_words(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_epi32(mask, p); }
inline __m512i load_words(__mmask16 mask, const bf16* p) { return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)); }
inline void store_words(__mmask16 mask, float* p, __m512i v) { _mm512_mask_storeu_epi32(p, mask, v); }
inline void store_words(__mmask16 mask, bf16* p, __m512i v) { _mm256_mask_storeu_epi16(p, mask, _mm512_cvtepi32_epi16(v)); }
#endif

template <class T>
void transpose(int64_t rows, int64_t cols, const T* x, int64_t ldx, T* y) {
  parallel((cols + W - 1) / W, grain(rows * W), [&](int64_t begin, int64_t end) {
    for (int64_t c0 = begin * W; c0 < std::min(end * W, cols); c0 += W)
      for (int64_t r0 = 0; r0 < rows; r0 += W) {
        const int64_t nc = std::min<int64_t>(W, cols - c0), nr = std::min<int64_t>(W, rows - r0);
#if defined(VIME_AVX512)
        const __mmask16 wide = __mmask16((1u << nc) - 1), high = __mmask16((1u << nr) - 1);
        __m512i words[W];
        for (int64_t r = 0; r < W; ++r) words[r] = r < nr ? load_words(wide, x + (r0 + r) * ldx + c0) : _mm512_setzero_si512();
        transpose16(words);
        for (int64_t c = 0; c < nc; ++c) store_words(high, y + (c0 + c) * rows + r0, words[c]);
#else
        for (int64_t c = c0; c < c0 + nc; ++c)
          for (int64_t r = r0; r < r0 + nr; ++r) y[c * rows + r] = x[r * ldx + c];
#endif
      }
  });
}
template void transpose(int64_t, int64_t, const float*, int64_t, float*);
template void transpose(int64_t, int64_t, const bf16*, int64_t, bf16*);

}  // namespace vime
