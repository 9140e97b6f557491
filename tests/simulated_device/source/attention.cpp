// Attention without the matrix of scores, as on CUDA: the CPU's flash kernel, where it can serve (no dropout, no
// gradient of a mask); elsewhere torch takes its path of plain products.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels.h"

namespace sim {
using at::Tensor;
namespace {
int64_t choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool is_causal, std::optional<double>, bool) {
  bool fits = at::globalContext().userEnabledFlashSDP() && dropout == 0 && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
      at::isFloatingType(q.scalar_type()) && q.dtype() == k.dtype() && q.dtype() == v.dtype() && q.size(-1) == k.size(-1) && q.size(-1) == v.size(-1) &&
      q.size(0) == k.size(0) && k.sizes() == v.sizes() && k.size(1) && q.size(1) % k.size(1) == 0 && q.numel() && k.numel() &&
      q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1;
  if (mask) fits = fits && !is_causal && !mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4);
  return int64_t(fits ? at::SDPBackend::overrideable : at::SDPBackend::math);
}
// (batch, heads, length, width), of which a row of all heads is contiguous
Tensor rows(const Tensor& like, int64_t heads, int64_t length, int64_t width, at::ScalarType dtype) {
  return at::empty({like.size(0), length, heads, width}, like.options().dtype(dtype)).transpose(1, 2);
}
double attention_flops(const Tensor& q, const Tensor& k, bool is_causal) {
  return 4.0 * q.size(0) * q.size(1) * q.size(2) * k.size(2) * q.size(3) * (is_causal ? 0.5 : 1);
}
Tensor spread(const Tensor& t, int64_t heads) { return heads == t.size(1) ? t : t.repeat_interleave(heads / t.size(1), 1); }
Tensor folded(const Tensor& t, int64_t heads) {
  return heads == t.size(1) ? t : t.reshape({t.size(0), heads, t.size(1) / heads, t.size(2), t.size(3)}).sum(2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool is_causal, bool, std::optional<double> scale) {
  TORCH_CHECK(dropout == 0, "sim: fused attention has no dropout");
  int64_t heads = q.size(1);
  auto out = rows(q, heads, q.size(2), v.size(3), q.scalar_type());
  auto sums = at::empty({q.size(0), q.size(2), heads}, q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)).transpose(1, 2);
  Cost cost{Kind::kernel, nbytes_of(q) + nbytes_of(k) + nbytes_of(v) + nbytes_of(out), attention_flops(q, k, is_causal), rate_of(q.scalar_type())};
  std::optional<Tensor> bias;
  if (mask && mask->defined()) bias = alias_of(*mask);
  launch(q.device().index(), "attention", cost, [=, q = alias_of(q), k = alias_of(k), v = alias_of(v), out = alias_of(out), sums = alias_of(sums)] {
    auto [o, s] = at::_scaled_dot_product_flash_attention_for_cpu(q, spread(k, heads), spread(v, heads), 0.0, is_causal, bias, scale);
    out.copy_(o);
    sums.copy_(s);
  });
  auto none = at::empty({0}, q.options().dtype(at::kLong));
  return {out, sums, Tensor(), Tensor(), q.size(2), k.size(2), none, none, Tensor()};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, std::array<bool, 4>, const Tensor& out, const Tensor& sums,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  int64_t heads = q.size(1), fewer = k.size(1);
  auto dq = rows(q, heads, q.size(2), q.size(3), q.scalar_type());
  auto dk = rows(k, fewer, k.size(2), k.size(3), k.scalar_type()), dv = rows(v, fewer, v.size(2), v.size(3), v.scalar_type());
  Cost cost{Kind::kernel, 2 * (nbytes_of(q) + nbytes_of(k) + nbytes_of(v) + nbytes_of(out)), 2.5 * attention_flops(q, k, is_causal), rate_of(q.scalar_type())};
  std::optional<Tensor> bias;
  if (mask.defined()) bias = alias_of(mask);
  launch(q.device().index(), "attention backward", cost,
      [=, grad = alias_of(grad), q = alias_of(q), k = alias_of(k), v = alias_of(v), out = alias_of(out), sums = alias_of(sums), dq = alias_of(dq), dk = alias_of(dk), dv = alias_of(dv)] {
    auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, spread(k, heads), spread(v, heads), out, sums, 0.0, is_causal, bias, scale);
    dq.copy_(a);
    dk.copy_(folded(b, fewer));
    dv.copy_(folded(c, fewer));
  });
  return {dq, dk, dv, Tensor()};
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attend);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attend_backward);
}
int64_t choice_of_stub(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale, bool gqa) {
  return choice(q, k, v, mask, dropout, is_causal, scale, gqa);
}
}  // namespace sim
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choice_of_stub)
}
