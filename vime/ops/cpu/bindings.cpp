// The only file that sees torch: checks, pointers, torch's thread pool.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/Parallel.h>

#include <mutex>
#include <set>
#include <thread>

#include "kernels.h"

#ifndef INTRA_OP_PARALLEL
#error "compile with OpenMP (-fopenmp): without it torch's at::parallel_for runs every loop on one thread"
#endif

namespace vime {
void parallel(int64_t n, int64_t grain, const Body& body) {
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end); });
}
int threads() { return at::get_num_threads(); }
}  // namespace vime

namespace {
using at::Tensor;
using std::optional;

template <class T> T* ptr(const Tensor& t) { return static_cast<T*>(t.data_ptr()); }
template <class T> T* ptr(const optional<Tensor>& t) { return t ? ptr<T>(*t) : nullptr; }

template <class F> void by_dtype(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) f(float{});
  else if (x.scalar_type() == at::kBFloat16) f(vime::bf16{});
  else TORCH_CHECK(false, "vime cpu kernels cover float32 and bfloat16, found ", x.scalar_type());
}
// Rows [R, width] with contiguous columns.
Tensor rows(const Tensor& x) {
  Tensor flat = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  return flat.numel() == 0 || flat.stride(1) == 1 || flat.size(1) == 1 ? flat : flat.contiguous();
}
int64_t ld(const Tensor& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }
std::vector<int64_t> like(const Tensor& x, int64_t last) {
  auto s = x.sizes().vec();
  s.back() = last;
  return s;
}
// [T, H, D] with contiguous D.
Tensor heads(const Tensor& x) { return x.stride(2) == 1 || x.size(2) == 1 ? x : x.contiguous(); }
Tensor i32(const Tensor& x) { return x.to(at::kInt).contiguous(); }

Tensor linear(const Tensor& x, const Tensor& w) {
  Tensor xr = rows(x), wr = rows(w), y = at::empty(like(x, w.size(0)), x.options());
  const int64_t M = x.numel() ? xr.size(0) : y.numel() / std::max<int64_t>(1, w.size(0)), N = w.size(0), K = w.size(1);
  if (y.numel() == 0) return y;
  if (K == 0) return y.zero_();
  by_dtype(x, [&](auto t) { using T = decltype(t); vime::gemm(M, N, K, ptr<T>(xr), ld(xr), ptr<T>(wr), ld(wr), ptr<T>(y), N); });
  return y;
}
Tensor transpose(const Tensor& x) {  // [R, C] -> contiguous [C, R]
  Tensor xr = rows(x), y = at::empty({x.size(1), x.size(0)}, x.options());
  by_dtype(x, [&](auto t) { using T = decltype(t); vime::transpose(x.size(0), x.size(1), ptr<T>(xr), ld(xr), ptr<T>(y)); });
  return y;
}
Tensor rms_norm(const Tensor& x, const Tensor& w, double eps) {
  Tensor xr = rows(x), wc = w.contiguous(), y = at::empty(x.sizes(), x.options());
  if (y.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::rms_norm<T>(xr.size(0), xr.size(1), ptr<T>(xr), ld(xr), nullptr, 0, ptr<T>(wc), float(eps), nullptr, ptr<T>(y)); });
  return y;
}
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& w, double eps) {
  Tensor xr = rows(x), rr = rows(residual), wc = w.contiguous(), y = at::empty(x.sizes(), x.options()), out = at::empty(x.sizes(), x.options());
  if (y.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::rms_norm<T>(xr.size(0), xr.size(1), ptr<T>(xr), ld(xr), ptr<T>(rr), ld(rr), ptr<T>(wc), float(eps), ptr<T>(out), ptr<T>(y)); });
  return {y, out};
}
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& x, const Tensor& w, const Tensor& dy, double eps) {
  Tensor xc = x.contiguous(), wc = w.contiguous(), gc = dy.contiguous(), dx = at::empty(x.sizes(), x.options()), dw = at::empty(w.sizes(), w.options());
  const int64_t H = w.size(0);
  by_dtype(x, [&](auto t) { using T = decltype(t); vime::rms_norm_backward<T>(H ? x.numel() / H : 0, H, ptr<T>(xc), ptr<T>(wc), ptr<T>(gc), float(eps), ptr<T>(dx), ptr<T>(dw)); });
  return {dx, dw};
}
Tensor apply_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, double sign) {
  Tensor xh = heads(x), c = cos.contiguous(), s = sin.contiguous(), y = at::empty(x.sizes(), x.options());
  if (y.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::apply_rope<T>(x.size(0), x.size(1), x.size(2), c.size(1), ptr<T>(xh), xh.stride(0), xh.stride(1), ptr<float>(c), ptr<float>(s), interleaved, float(sign), ptr<T>(y)); });
  return y;
}
std::tuple<Tensor, Tensor> rope_table(const Tensor& positions, const Tensor& frequencies) {
  Tensor p = positions.contiguous(), f = frequencies.contiguous();
  Tensor cos = at::empty({p.size(0), f.size(0)}, at::kFloat), sin = at::empty_like(cos);
  vime::rope_table(p.size(0), f.size(0), ptr<int64_t>(p), ptr<double>(f), ptr<float>(cos), ptr<float>(sin));
  return {cos, sin};
}
Tensor silu_and_mul(const Tensor& x) {
  Tensor xr = rows(x), y = at::empty(like(x, x.size(-1) / 2), x.options());
  if (y.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::silu_and_mul<T>(xr.size(0), y.size(-1), ptr<T>(xr), ld(xr), ptr<T>(y)); });
  return y;
}
Tensor silu_and_mul_backward(const Tensor& x, const Tensor& dy) {
  Tensor xc = x.contiguous(), gc = dy.contiguous(), dx = at::empty(x.sizes(), x.options());
  const int64_t F = dy.size(-1);
  if (dx.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::silu_and_mul_backward<T>(dy.numel() / F, F, ptr<T>(xc), ptr<T>(gc), ptr<T>(dx)); });
  return dx;
}
Tensor embedding(const Tensor& ids_, const Tensor& w) {
  Tensor ids = ids_.to(at::kLong).contiguous(), wc = w.contiguous();
  auto shape = ids_.sizes().vec();
  shape.push_back(w.size(1));
  Tensor y = at::empty(shape, w.options());
  if (ids.numel() == 0) return y;
  by_dtype(w, [&](auto t) {
    using T = decltype(t);
    const int64_t bad = vime::embedding<T>(ids.numel(), w.size(1), w.size(0), ptr<int64_t>(ids), ptr<T>(wc), ptr<T>(y));
    TORCH_CHECK_INDEX(bad < 0, "embedding: id ", ptr<int64_t>(ids)[bad < 0 ? 0 : bad], " at index ", bad, " is outside a vocabulary of ", w.size(0));
  });
  return y;
}
Tensor embedding_backward(const Tensor& sorted_ids, const Tensor& order, const Tensor& dy, int64_t V) {
  Tensor gc = dy.contiguous(), dw = at::zeros({V, dy.size(-1)}, dy.options());
  if (gc.numel()) by_dtype(dy, [&](auto t) { using T = decltype(t); vime::embedding_backward<T>(sorted_ids.size(0), dy.size(-1), ptr<int64_t>(sorted_ids), ptr<int64_t>(order), ptr<T>(gc), ptr<T>(dw)); });
  return dw;
}
Tensor log_softmax_forward(const Tensor& x, const Tensor& temperature, const optional<Tensor>& ids, const optional<Tensor>& out, const optional<Tensor>& lp, const optional<Tensor>& max, const optional<Tensor>& logsum, const optional<Tensor>& entropy) {
  Tensor xr = rows(x);
  if (xr.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::log_softmax<T>(xr.size(0), xr.size(1), ptr<T>(xr), ld(xr), ptr<float>(temperature), ptr<int64_t>(ids), ptr<float>(out), ptr<float>(lp), ptr<float>(max), ptr<float>(logsum), ptr<float>(entropy)); });
  return xr;
}
Tensor log_softmax_backward(const Tensor& x, const Tensor& temperature, const Tensor& max, const Tensor& logsum, const optional<Tensor>& ids, const Tensor& g) {
  Tensor xr = rows(x), dx = at::empty(x.sizes(), x.options()), gc = g.contiguous();
  if (dx.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::log_softmax_backward<T>(xr.size(0), xr.size(1), ptr<T>(xr), ld(xr), ptr<float>(temperature), ptr<float>(max), ptr<float>(logsum), ptr<int64_t>(ids), ptr<float>(gc), ids ? 0 : gc.size(1), ptr<T>(dx)); });
  return dx;
}
Tensor sample(const Tensor& x, const Tensor& seed, const Tensor& position, const Tensor& temperature, const optional<Tensor>& top_k, const optional<Tensor>& top_p) {
  Tensor xr = rows(x), out = at::empty({x.size(0)}, at::kLong);
  if (xr.numel()) by_dtype(x, [&](auto t) { using T = decltype(t); vime::sample<T>(xr.size(0), xr.size(1), ptr<T>(xr), ld(xr), ptr<int64_t>(seed), ptr<int64_t>(position), ptr<float>(temperature), ptr<int64_t>(top_k), ptr<float>(top_p), ptr<int64_t>(out)); });
  return out;
}

struct Packed {  // arguments of the packed form, with the tensors that own the pointers
  Tensor q, k, v, starts, lens;
  vime::AttentionArgs a{};
  Packed(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& cu, double scale, bool causal)
      : q(heads(q_)), k(heads(k_)), v(heads(v_)), starts(i32(cu)), lens(at::diff(starts).contiguous()) {
    const int32_t* c = ptr<int32_t>(starts);
    const int64_t n = starts.size(0);
    TORCH_CHECK_VALUE(c[0] == 0 && c[n - 1] <= q.size(0), "cu_seqlens must start at 0 and end within the ", q.size(0), " rows, found ", c[0], " ... ", c[n - 1]);
    for (int64_t i = 1; i < n; ++i) TORCH_CHECK_VALUE(c[i] >= c[i - 1], "cu_seqlens must not fall, found ", c[i - 1], " then ", c[i], " at index ", i);
    TORCH_CHECK_VALUE(q.size(2) % 2 == 0, "head_dim ", q.size(2), " must be even");
    a.sequences = n - 1, a.heads = q.size(1), a.groups = k.size(1), a.D = q.size(2);
    a.q_start = c, a.kv_start = c, a.kv_len = ptr<int32_t>(lens);
    a.q_ldt = q.stride(0), a.q_ldh = q.stride(1), a.kv_ldt = k.stride(0), a.kv_ldg = k.stride(1), a.v_ldt = v.stride(0), a.v_ldg = v.stride(1);
    a.scale = float(scale), a.causal = causal;
  }
};
Tensor output_like(const Tensor& q, int64_t used) {
  Tensor o = at::empty(q.sizes(), q.options());
  if (used < q.size(0)) o.slice(0, used).zero_();
  return o;
}
Tensor attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu, double scale, bool causal, const optional<Tensor>& lse) {
  Packed p(q, k, v, cu, scale, causal);
  p.a.lse = ptr<float>(lse);
  Tensor o = output_like(q, p.a.q_start[p.a.sequences]);
  by_dtype(q, [&](auto t) { using T = decltype(t); vime::attention_packed<T>(p.a, ptr<T>(p.q), ptr<T>(p.k), ptr<T>(p.v), ptr<T>(o)); });
  return o;
}
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu, double scale, bool causal, const Tensor& lse, const Tensor& o, const Tensor& d_o) {
  Packed p(q, k, v, cu, scale, causal);
  p.a.lse = ptr<float>(lse);
  Tensor oc = o.contiguous(), gc = d_o.contiguous();
  const int64_t used = p.a.q_start[p.a.sequences];
  Tensor dq = output_like(q, used), dk = output_like(k, used), dv = output_like(v, used);
  by_dtype(q, [&](auto t) { using T = decltype(t); vime::attention_backward<T>(p.a, ptr<T>(p.q), ptr<T>(p.k), ptr<T>(p.v), ptr<T>(oc), ptr<T>(gc), ptr<T>(dq), ptr<T>(dk), ptr<T>(dv)); });
  return {dq, dk, dv};
}
// cache [blocks, 2, groups, block_size, D]
Tensor attention_paged(const Tensor& q_, const Tensor& cache, const Tensor& table_, const Tensor& lens_, const Tensor& starts_, double scale) {
  Tensor q = heads(q_), table = i32(table_), lens = i32(lens_), starts = i32(starts_);
  vime::AttentionArgs a{};
  a.sequences = lens.size(0), a.heads = q.size(1), a.groups = cache.size(2), a.D = q.size(2);
  a.q_start = ptr<int32_t>(starts), a.kv_len = ptr<int32_t>(lens), a.block_table = ptr<int32_t>(table);
  a.ldb = table.size(1), a.block_size = cache.size(3), a.q_ldt = q.stride(0), a.q_ldh = q.stride(1), a.scale = float(scale), a.causal = true;
  TORCH_CHECK_VALUE(cache.is_contiguous() && cache.size(4) == a.D && a.heads % a.groups == 0, "cache ", cache.sizes(), " does not fit q ", q.sizes());
  const int32_t* s = a.q_start;
  TORCH_CHECK_VALUE(s[0] == 0 && s[a.sequences] <= q.size(0), "query_start_loc must start at 0 and end within the ", q.size(0), " rows");
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t n = s[b + 1] - s[b], blocks = (a.kv_len[b] + a.block_size - 1) / a.block_size;
    TORCH_CHECK_VALUE(n >= 0 && n <= a.kv_len[b] && blocks <= a.ldb, "sequence ", b, ": ", n, " queries, length ", a.kv_len[b], ", ", a.ldb, " blocks of ", a.block_size);
    for (int64_t i = 0; n > 0 && i < blocks; ++i) {
      const int32_t block = a.block_table[b * a.ldb + i];
      TORCH_CHECK_VALUE(block >= 0 && block < cache.size(0), "sequence ", b, ": block ", block, " is not in a cache of ", cache.size(0));
    }
  }
  Tensor o = output_like(q, s[a.sequences]);
  by_dtype(q, [&](auto t) { using T = decltype(t); vime::attention_paged<T>(a, ptr<T>(q), ptr<T>(cache), ptr<T>(o)); });
  return o;
}
void kv_cache_write(const Tensor& k_, const Tensor& v_, const Tensor& cache, const Tensor& slots_) {
  Tensor k = heads(k_), v = heads(v_), slots = slots_.to(at::kLong).contiguous();
  TORCH_CHECK_VALUE(cache.dim() == 5 && cache.is_contiguous() && cache.scalar_type() == k.scalar_type() && cache.size(2) == k.size(1) && cache.size(4) == k.size(2),
                    "cache ", cache.sizes(), " ", cache.scalar_type(), " does not fit k ", k.sizes(), " ", k.scalar_type());
  const int64_t limit = cache.size(0) * cache.size(3);
  for (int64_t i = 0; i < slots.size(0); ++i) TORCH_CHECK_INDEX(ptr<int64_t>(slots)[i] < limit, "slot ", ptr<int64_t>(slots)[i], " is beyond a cache of ", limit);
  by_dtype(k, [&](auto t) { using T = decltype(t); vime::kv_cache_write<T>(slots.size(0), k.size(1), k.size(2), cache.size(3), ptr<T>(k), k.stride(0), k.stride(1), ptr<T>(v), v.stride(0), v.stride(1), ptr<int64_t>(slots), ptr<T>(cache)); });
}

// How many threads a loop really runs on.
int64_t workers() {
  std::mutex lock;
  std::set<std::thread::id> seen;
  vime::parallel(vime::threads(), 1, [&](int64_t, int64_t) { std::lock_guard<std::mutex> hold(lock); seen.insert(std::this_thread::get_id()); });
  return int64_t(seen.size());
}
}  // namespace

void bind_sparse(pybind11::module_& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_sparse(m);
#define VIME_DEF(name, ...) m.def(#name, &name, py::call_guard<py::gil_scoped_release>())
  VIME_DEF(linear); VIME_DEF(transpose); VIME_DEF(rms_norm); VIME_DEF(add_rms_norm); VIME_DEF(rms_norm_backward);
  VIME_DEF(apply_rope); VIME_DEF(rope_table); VIME_DEF(silu_and_mul); VIME_DEF(silu_and_mul_backward); VIME_DEF(embedding); VIME_DEF(embedding_backward);
  VIME_DEF(workers); VIME_DEF(log_softmax_forward); VIME_DEF(log_softmax_backward); VIME_DEF(sample);
  VIME_DEF(attention_varlen); VIME_DEF(attention_backward); VIME_DEF(attention_paged); VIME_DEF(kv_cache_write);
  m.def("attention_kind", [](bool bf16) { return std::string(bf16 ? vime::attention_kind(vime::bf16{}) : vime::attention_kind(0.f)); });
  m.def("gemm_kind", [](bool bf16) { return std::string(bf16 ? vime::gemm_kind(vime::bf16{}) : vime::gemm_kind(0.f)); });
}
