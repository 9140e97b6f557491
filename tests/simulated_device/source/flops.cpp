#include <ATen/Context.h>

#include "kernels.h"

namespace sim {
namespace {
double product(c10::IntArrayRef sizes) {
  double n = 1;
  for (auto s : sizes) n *= s;
  return n;
}
const at::Tensor& tensor(const torch::jit::Stack& args, size_t i) { return args[i].toTensor(); }
// rows x inner by inner x columns, in so many batches
double matmul(const at::Tensor& a, const at::Tensor& b) { return 2 * product(a.sizes()) * b.size(-1); }
// Each element of the output takes one product and one sum with each weight of its channel.
double convolution(const at::Tensor& weight, const at::Tensor& input, const at::Tensor& output, bool transposed) {
  double per_channel = product(weight.sizes()) / weight.size(0);
  const auto& spread = transposed ? input : output;
  return 2 * product(spread.sizes()) * per_channel;
}
}  // namespace

double nbytes_of(const at::Tensor& t) {
  // A broadcast tensor holds fewer bytes than it has elements.
  double n = 1;
  for (int64_t i = 0; i < t.dim(); ++i) n *= t.stride(i) == 0 && t.size(i) > 0 ? 1 : t.size(i);
  return n * t.itemsize();
}
Rate rate_of(at::ScalarType dtype) {
  if (dtype == at::kHalf || dtype == at::kBFloat16) return kHalf;
  if (dtype != at::kFloat) return kFloat32;
  return at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST ? kFloat32 : kTensorFloat32;
}
double flops_of(const std::string& name, const torch::jit::Stack& args, const torch::jit::Stack& results) {
  auto is = [&](const char* text) {
    std::string full = std::string("aten::") + text;
    return name == full || name.rfind(full + ".", 0) == 0;
  };
  if (is("mm") || is("bmm") || is("mv") || is("dot")) return is("dot") || is("mv") ? 2 * product(tensor(args, 0).sizes()) : matmul(tensor(args, 0), tensor(args, 1));
  if (is("addmm") || is("addmm_") || is("baddbmm") || is("baddbmm_") || is("_addmm_activation")) return matmul(tensor(args, 1), tensor(args, 2));
  if (is("linear")) return 2 * product(tensor(args, 0).sizes()) * tensor(args, 1).size(0);
  if (is("convolution") || is("_convolution") || is("convolution_overrideable"))
    return convolution(tensor(args, 1), tensor(args, 0), results[0].toTensor(), args[6].toBool());
  if (is("convolution_backward")) {
    auto wanted = args[10].toBoolList();
    double one = convolution(tensor(args, 2), tensor(args, 1), tensor(args, 0), args[7].toBool());
    return one * (int(wanted[0]) + int(wanted[1]));
  }
  return 0;
}
}  // namespace sim
