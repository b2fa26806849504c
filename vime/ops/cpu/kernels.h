// What the kernels offer to the binding. Plain pointers: only bindings.cpp sees torch.
#pragma once
#include <cstdint>
#include <algorithm>
#include <cstdlib>
#include <functional>

#include "simd.h"

namespace vime {

// Runs body(begin, end) over [0, n) on torch's thread pool, at least `grain` items a call. Set by the binding.
using Body = std::function<void(int64_t, int64_t)>;
void parallel(int64_t n, int64_t grain, const Body& body);
int threads();
// Rows of so many elements a thread should at least have: what a second thread does must be worth more than waiting for
// it, and on a busy machine it may have to be waited for.
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(width, 1)); }
constexpr int64_t THREAD_WORK = 262144;  // the same in multiply-adds

// y[M, N] = x[M, K] w[N, K]^T; ld* = distance of rows in elements.
const char* gemm_kind(float);
const char* gemm_kind(bf16);
void gemm(int64_t M, int64_t N, int64_t K, const float* x, int64_t ldx, const float* w, int64_t ldw, float* y, int64_t ldy);
void gemm(int64_t M, int64_t N, int64_t K, const bf16* x, int64_t ldx, const bf16* w, int64_t ldw, bf16* y, int64_t ldy);
template <class T> void transpose(int64_t rows, int64_t cols, const T* x, int64_t ldx, T* y);  // y[cols, rows]

// residual may be null; then residual_out too.
template <class T> void rms_norm(int64_t rows, int64_t H, const T* x, int64_t ldx, const T* residual, int64_t ldr, const T* w, float eps, T* residual_out, T* y);
template <class T> void rms_norm_backward(int64_t rows, int64_t H, const T* x, const T* w, const T* dy, float eps, T* dx, T* dw);
template <class T> void apply_rope(int64_t tokens, int64_t heads, int64_t D, int64_t R, const T* x, int64_t ldt, int64_t ldh, const float* cos, const float* sin, bool interleaved, float sign, T* y);
void rope_table(int64_t tokens, int64_t R, const int64_t* positions, const double* frequencies, float* cos, float* sin);
template <class T> void silu_and_mul(int64_t rows, int64_t F, const T* x, int64_t ldx, T* y);
template <class T> void silu_and_mul_backward(int64_t rows, int64_t F, const T* x, const T* dy, T* dx);
template <class T> int64_t embedding(int64_t tokens, int64_t H, int64_t V, const int64_t* ids, const T* w, T* y);
template <class T> void embedding_backward(int64_t tokens, int64_t H, const int64_t* sorted_ids, const int64_t* order, const T* dy, T* dw);

// out / lse / lp / entropy may be null.
template <class T> void log_softmax(int64_t rows, int64_t V, const T* x, int64_t ldx, const float* temperature, const int64_t* ids, float* out, float* lp, float* max, float* logsum, float* entropy);
template <class T> void log_softmax_backward(int64_t rows, int64_t V, const T* x, int64_t ldx, const float* temperature, const float* max, const float* logsum, const int64_t* ids, const float* g, int64_t ldg, T* dx);
template <class T> void sample(int64_t rows, int64_t V, const T* x, int64_t ldx, const int64_t* seed, const int64_t* position, const float* temperature, const int64_t* top_k, const float* top_p, int64_t* out);

// Attention. Sequence b has queries [q_start[b], q_start[b+1]), the last of kv_len[b] positions.
// Packed keys of b start at row kv_start[b]; in the paged form block_table (row stride ldb) names blocks.
struct AttentionArgs {
  int64_t sequences, heads, groups, D;
  const int32_t *q_start, *kv_len, *kv_start, *block_table;
  int64_t ldb, block_size;
  int64_t q_ldt, q_ldh, kv_ldt, kv_ldg, v_ldt, v_ldg;
  float scale;
  bool causal;
  float* lse;  // [tokens, heads] or null
};
const char* attention_kind(float);
const char* attention_kind(bf16);
template <class T> void attention_packed(const AttentionArgs& a, const T* q, const T* k, const T* v, T* o);
template <class T> void attention_paged(const AttentionArgs& a, const T* q, const T* cache, T* o);
template <class T> void kv_cache_write(int64_t tokens, int64_t groups, int64_t D, int64_t block_size, const T* k, int64_t k_ldt, int64_t k_ldg, const T* v, int64_t v_ldt, int64_t v_ldg, const int64_t* slots, T* cache);
template <class T> void attention_backward(const AttentionArgs& a, const T* q, const T* k, const T* v, const T* o, const T* d_o, T* dq, T* dk, T* dv);

}  // namespace vime
