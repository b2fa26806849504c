// Checks and pointers for sparse.cpp; called by the module's one entry in bindings.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "sparse.h"

namespace {
using at::Tensor;

struct Sparse {
  Tensor q, kv, index;
  vime::SparseArgs a{};
  Sparse(const Tensor& q_, const Tensor& kv_, const Tensor& index_, int64_t value_dim, double scale)
      : q(q_.stride(2) == 1 ? q_ : q_.contiguous()), kv(kv_.stride(1) == 1 ? kv_ : kv_.contiguous()), index(index_.to(at::kInt).contiguous()) {
    a.tokens = q.size(0), a.heads = q.size(1), a.D = q.size(2), a.Dv = value_dim, a.slots = index.size(1);
    a.index = static_cast<int32_t*>(index.data_ptr()), a.q_ldt = q.stride(0), a.q_ldh = q.stride(1), a.kv_ld = kv.stride(0), a.scale = float(scale);
    for (int64_t i = 0; i < index.numel(); ++i)
      TORCH_CHECK_INDEX(a.index[i] < kv.size(0), "sparse_attention: token ", i / a.slots, ", entry ", i % a.slots, " names row ", a.index[i], " of ", kv.size(0));
  }
};
template <class F> void by_dtype(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) f(float{});
  else f(vime::bf16{});
}
template <class T> T* ptr(const Tensor& t) { return static_cast<T*>(t.data_ptr()); }

std::tuple<Tensor, Tensor> sparse_attention(const Tensor& q, const Tensor& kv, const Tensor& index, int64_t value_dim, double scale) {
  Sparse p(q, kv, index, value_dim, scale);
  Tensor o = at::empty({q.size(0), q.size(1), value_dim}, q.options()), lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  p.a.lse = ptr<float>(lse);
  if (o.numel()) by_dtype(q, [&](auto t) { using T = decltype(t); vime::sparse_attention<T>(p.a, ptr<T>(p.q), ptr<T>(p.kv), ptr<T>(o)); });
  return {o, lse};
}
std::tuple<Tensor, Tensor> sparse_attention_backward(const Tensor& q, const Tensor& kv, const Tensor& index, double scale, const Tensor& lse, const Tensor& o, const Tensor& d_o) {
  Sparse p(q, kv, index, o.size(2), scale);
  Tensor oc = o.contiguous(), gc = d_o.contiguous(), lc = lse.contiguous();
  Tensor dq = at::empty(q.sizes(), q.options()), drows = at::empty({q.size(0), index.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  p.a.lse = ptr<float>(lc);
  if (dq.numel()) by_dtype(q, [&](auto t) { using T = decltype(t); vime::sparse_attention_backward<T>(p.a, ptr<T>(p.q), ptr<T>(p.kv), ptr<T>(oc), ptr<T>(gc), ptr<T>(dq), ptr<float>(drows)); });
  return {dq, drows};
}
Tensor elementwise(const Tensor& x, void (*f)(int64_t, const float*, float*)) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "router scores are float32, found ", x.scalar_type());
  Tensor xc = x.contiguous(), y = at::empty(x.sizes(), x.options());
  f(xc.numel(), ptr<float>(xc), ptr<float>(y));
  return y;
}
Tensor sigmoid(const Tensor& x) { return elementwise(x, vime::sigmoid); }
Tensor exponential(const Tensor& x) { return elementwise(x, vime::exponential); }
}  // namespace

void bind_sparse(pybind11::module_& m) {
  namespace py = pybind11;
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  m.def("sparse_attention", &sparse_attention, free_gil);
  m.def("sparse_attention_backward", &sparse_attention_backward, free_gil);
  m.def("sigmoid", &sigmoid, free_gil);
  m.def("exponential", &exponential, free_gil);
}
