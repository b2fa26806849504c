// What sparse.cpp offers to its binding.
#pragma once
#include "kernels.h"

namespace vime {

// q [tokens, heads, D]; kv rows of D elements, the first Dv of which are the value; index [tokens, slots], -1 past the end.
struct SparseArgs {
  int64_t tokens, heads, D, Dv, slots;
  const int32_t* index;
  int64_t q_ldt, q_ldh, kv_ld;
  float scale;
  float* lse;  // [tokens, heads] or null
};
template <class T> void sparse_attention(const SparseArgs& a, const T* q, const T* kv, T* o);
template <class T> void sparse_attention_backward(const SparseArgs& a, const T* q, const T* kv, const T* o, const T* d_o, T* dq, float* drows);
void sigmoid(int64_t n, const float* x, float* y);
void exponential(int64_t n, const float* x, float* y);

}  // namespace vime
