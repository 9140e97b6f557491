#include "kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <map>

#include "addresses.h"
#include "allocator.h"
#include "generators.h"

namespace sim {
using at::IValue;
using at::Tensor;
using torch::jit::Stack;

namespace {
std::mutex names_lock;
std::map<std::string, int64_t> issued_ops, waiting_ops;

Tensor numbered_like(Tensor t, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}
Tensor meta_of(const Tensor& t) {
  if (!t.defined()) return t;
  TORCH_CHECK(t.layout() == at::kStrided, "sim: only strided tensors");
  // Meta kernels in Python want a number of Python on the CPU.
  if (!is_sim(t) && t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(at::kMeta));
}
template <class F>
IValue mapped(const IValue& v, const F& f, c10::Device device) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return v.isDevice() ? IValue(device) : v;
}
template <class F>
void each_tensor(const IValue& v, const F& f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const Tensor& t : v.toTensorVector()) if (t.defined()) f(t);
  } else if (v.isOptionalTensorList()) {
    for (const auto& t : v.toOptionalTensorVector()) if (t && t->defined()) f(*t);
  }
}

// What a schema says of an op; read once per op.
struct Form {
  std::string name;
  std::vector<size_t> written, generators;
  bool is_view = false, in_place = false, tensors_only = true;
  std::vector<int> argument_of_return;  // -1: a new tensor
};
const Form& form_of(const c10::OperatorHandle& op) {
  static auto* forms = new std::map<c10::OperatorName, Form, bool (*)(const c10::OperatorName&, const c10::OperatorName&)>(
      [](const c10::OperatorName& a, const c10::OperatorName& b) { return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name); });
  std::lock_guard<std::mutex> held(names_lock);
  const auto& schema = op.schema();
  auto [at, is_new] = forms->try_emplace(schema.operator_name());
  Form& form = at->second;
  if (!is_new) return form;
  form.name = toString(schema.operator_name());
  bool reads_alias = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& a = schema.arguments()[i];
    if (a.alias_info()) a.alias_info()->isWrite() ? form.written.push_back(i) : void(reads_alias = true);
    if (a.type()->str().find("Generator") != std::string::npos) form.generators.push_back(i);
  }
  form.is_view = reads_alias && form.written.empty() && schema.returns().size() == 1;
  form.in_place = !form.written.empty() && schema.name().back() == '_';
  for (const auto& r : schema.returns()) {
    auto text = r.type()->str();
    if (text != "Tensor" && text != "Tensor[]" && text != "List[Tensor]") form.tensors_only = false;
    if (!r.alias_info() || r.alias_info()->isWrite()) form.is_view = false;
    int from = -1;
    if (r.alias_info() && r.alias_info()->isWrite())
      for (size_t i : form.written)
        if (schema.arguments()[i].alias_info()->beforeSets() == r.alias_info()->beforeSets()) from = int(i);
    form.argument_of_return.push_back(from);
  }
  return form;
}

Tensor view_like(const Tensor& base, const Tensor& meta) {
  auto offset = base.storage_offset() * base.itemsize() / meta.itemsize() + meta.storage_offset();
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), offset);
  return out;
}
int device_of_args(const Stack& args, const Form& form) {
  int device = -1;
  for (const auto& v : args)
    each_tensor(v, [&](const Tensor& t) {
      if (is_sim(t)) {
        TORCH_CHECK(device < 0 || device == t.device().index() || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, sim:", device, " and ", t.device(), "! (", form.name, ")");
        if (device < 0) device = t.device().index();
      } else {
        TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || form.name.rfind("aten::index", 0) == 0 || form.name.rfind("aten::_index", 0) == 0),
            "Expected all tensors to be on the same device, but found at least two devices, sim and ", t.device(), "! (", form.name, ")");
      }
    });
  if (device >= 0) return device;
  for (const auto& v : args) if (v.isDevice() && v.toDevice().has_index()) return v.toDevice().index();
  return current_device();
}
// Reads as much of its first argument as it returns.
bool is_lookup(const std::string& name) {
  for (const char* known : {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})
    if (name == known || name.rfind(std::string(known) + ".", 0) == 0) return true;
  return false;
}
void copy_results(const Stack& from, const std::vector<std::pair<size_t, IValue>>& places) {
  for (auto& [r, place] : places) {
    std::vector<Tensor> to, made;
    each_tensor(place, [&](const Tensor& t) { to.push_back(t); });
    each_tensor(from[r], [&](const Tensor& t) { made.push_back(t); });
    TORCH_CHECK(to.size() == made.size(), "meta promised ", to.size(), " tensors, the kernel made ", made.size());
    for (size_t j = 0; j < to.size(); ++j) {
      TORCH_CHECK(to[j].sizes() == made[j].sizes(), "meta promised ", to[j].sizes(), ", the kernel made ", made[j].sizes());
      to[j].copy_(made[j]);
    }
  }
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  Uncounted here;
  const Form& form = form_of(op);
  const size_t n = op.schema().arguments().size();
  const Stack args(stack->end() - n, stack->end());
  const int device = device_of_args(args, form);
  at::AutoDispatchBelowADInplaceOrView below;

  Stack meta;
  bool known = form.tensors_only;
  if (known && !form.in_place) {
    for (const auto& v : args) meta.push_back(mapped(v, meta_of, c10::Device(at::kMeta)));
    auto inputs = meta;
    for (size_t i : form.generators) meta[i] = IValue();
    try {
      op.callBoxed(&meta);
    } catch (const std::exception&) {
      // No meta kernel, or one that needs values. An argument that it refused is refused by the CPU's kernel as well.
      known = false;
    }
    if (known)
      for (size_t i : form.written) {  // out= tensors that have to be resized
        std::vector<Tensor> outs, metas;
        each_tensor(args[i], [&](const Tensor& t) { outs.push_back(t); });
        each_tensor(inputs[i], [&](const Tensor& t) { metas.push_back(t); });
        for (size_t j = 0; j < outs.size(); ++j) if (outs[j].sizes() != metas[j].sizes()) outs[j].resize_(metas[j].sizes());
      }
  }
  if (known && form.is_view && meta[0].isTensor()) {
    Tensor base;
    for (auto& v : args) if (v.isTensor() && !base.defined()) base = v.toTensor();
    auto out = view_like(base, meta[0].toTensor());
    torch::jit::drop(*stack, n);
    stack->push_back(out);
    return;
  }
  known = known || form.in_place;
  {
    std::lock_guard<std::mutex> held(names_lock);
    (known ? issued_ops : waiting_ops)[form.name]++;
  }
  TORCH_CHECK(known || options().compute, "sim: ", form.name, " needs values, and this device computes none");

  const bool is_drawn_later = !form.generators.empty() && current_stream(device).recorded;
  Stack cpu;
  if (options().compute) for (const auto& v : args) cpu.push_back(mapped(v, alias_of, c10::Device(at::kCPU)));
  for (size_t i : form.generators) {
    TORCH_CHECK(!is_drawn_later || args[i].isNone(), "sim: only the default generator's draws can be recorded");
    if (is_drawn_later) continue;
    auto drawn = draw(device, args[i].isNone() ? std::nullopt : std::optional(args[i].toGenerator()));
    if (options().compute) cpu[i] = drawn;
  }
  Stack results;
  if (!known) {
    Stack out = cpu;
    run_and_wait(device, form.name, kOp, [&] { op.callBoxed(&out); });
    for (size_t r = 0; r < out.size(); ++r) {
      if (form.argument_of_return[r] >= 0) {
        results.push_back(args[form.argument_of_return[r]]);
        continue;
      }
      results.push_back(mapped(out[r], [&](const Tensor& t) {
        if (!t.defined()) return t;
        auto made = device_like(t, device);
        auto place = alias_of(made);
        launch(device, "result", {Kind::kernel, nbytes_of(t)}, [place, from = t.clone()] { place.copy_(from); });
        return made;
      }, device_of(device)));
    }
  } else {
    std::vector<std::pair<size_t, IValue>> places;  // result -> alias
    for (size_t r = 0; r < form.argument_of_return.size(); ++r) {
      if (form.argument_of_return[r] >= 0) {
        results.push_back(args[form.argument_of_return[r]]);
        continue;
      }
      IValue out = mapped(meta[r], [&](const Tensor& t) { return t.defined() ? device_like(t, device) : t; }, device_of(device));
      if (options().compute) places.emplace_back(r, mapped(out, alias_of, c10::Device(at::kCPU)));
      results.push_back(out);
    }
    Cost cost{Kind::kernel};
    if (profile().is_on) {
      auto add = [&](const Tensor& t) { if (is_sim(t)) cost.bytes += nbytes_of(t); };
      for (auto& v : args) each_tensor(v, add);
      if (is_lookup(form.name)) each_tensor(args[0], [&](const Tensor& t) {
        double returned = 0;
        for (auto& v : results) each_tensor(v, [&](const Tensor& r) { returned += nbytes_of(r); });
        if (is_sim(t)) cost.bytes -= std::max(0.0, nbytes_of(t) - returned);
      });
      if (form.in_place) for (size_t i : form.written) each_tensor(args[i], add);  // read and written
      for (size_t r = 0; r < results.size(); ++r) if (form.argument_of_return[r] < 0) each_tensor(results[r], add);
      cost.flops = flops_of(form.name, args, results);
      if (cost.flops > 0) each_tensor(args[0], [&](const Tensor& t) { cost.rate = rate_of(t.scalar_type()); });
    }
    // The CPU's losses resize their out= to the shape before the reduction for a while, which an alias can't.
    const bool is_loss = form.name.size() > 9 && form.name.ends_with("_loss.out");
    auto run = [op, places = std::move(places), out = is_loss ? int(form.written[0]) : -1](const Stack& given) {
      Stack s = given;
      if (out >= 0) s[out] = at::empty({0}, given[out].toTensor().options());
      op.callBoxed(&s);
      if (out >= 0) given[out].toTensor().copy_(s[0].toTensor());
      copy_results(s, places);
    };
    if (is_drawn_later) {
      auto drawn = [run, cpu = std::move(cpu), generators = form.generators, device]() -> std::function<void()> {
        Stack given = cpu;
        for (size_t i : generators) {
          auto one = draw(device, std::nullopt);
          if (options().compute) given[i] = one;
        }
        return [run, given = std::move(given)] { run(given); };
      };
      Entry here;
      current_stream(device).recorded->push_back({form.name, cost, nullptr, drawn});
    } else {
      launch(device, form.name, cost, [run, cpu = std::move(cpu)] { run(cpu); });
    }
  }
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(std::move(r));
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call(op, stack);
}
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const Stack args(stack->end() - 10, stack->end());
  torch::jit::drop(*stack, 10);
  auto weight = args[2].toTensor();
  int64_t channels = args[6].toBool() ? weight.size(1) * args[8].toInt() : weight.size(0);
  for (int i = 0; i < 3; ++i) stack->push_back(args[i]);
  stack->push_back(c10::List<int64_t>({channels}));
  for (int i = 3; i < 10; ++i) stack->push_back(args[i]);
  call(op, stack);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim: only strided tensors");
  c10::OptionalDeviceGuard there(device && device->has_index() ? *device : device_of(current_device()));
  return Tensor(at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format));
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard there(device && device->has_index() ? *device : device_of(current_device()));
  return Tensor(at::detail::empty_strided_generic(size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}
at::Scalar item(const Tensor& t) {
  at::Scalar found;
  auto alias = alias_of(t);
  run_and_wait(t.device().index(), "item", kItem, [&] { found = alias.item(); });
  if (!options().compute) found = c10::isIntegralType(t.scalar_type(), true) ? at::Scalar(int64_t(options().item)) : at::Scalar(options().item.load());
  if (t.scalar_type() == at::kBool && !options().compute) found = at::Scalar(options().item != 0);
  return found;
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}
void record_stream(Tensor& t, c10::Stream s) { record_use(t.storage().data_ptr().get(), s); }
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) { return at::cpu::as_strided_symint(t, size, stride, offset); }
Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) { return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride)); }
const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> f) { return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), f); }
Tensor& set_tensor(Tensor& t, const Tensor& s) { return at::native::set_tensor_(t, s); }
Tensor& set_storage(Tensor& t, at::Storage s) { return at::native::set_(t, s); }
Tensor& set_storage_offset(Tensor& t, at::Storage s, int64_t o, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::cpu::set_(t, s, o, size, stride); }
Tensor& zero(Tensor& t) {
  launch(t.device().index(), "aten::zero_", {Kind::kernel, nbytes_of(t)}, [alias = alias_of(t)] { alias.zero_(); });
  return t;
}
}  // namespace

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kType; }
Tensor alias_of(const Tensor& t) {
  if (!t.defined()) return t;
  if (!is_sim(t)) return numbered_like(t.clone(), t);
  TORCH_CHECK(t.layout() == at::kStrided, "sim: only strided tensors");
  auto alias = at::from_blob(alias_at(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(at::kCPU));
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return numbered_like(alias, t);
}
Tensor device_like(const Tensor& t, int device) {
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(device_of(device)));
}
void launch(int device, const std::string& name, const Cost& cost, std::function<void()> run) {
  Entry here;
  issue(current_stream(device), name, cost, std::move(run));
}
void run_and_wait(int device, const std::string& name, Call call, std::function<void()> run) {
  is_dropped(call, device, current_stream(device).id, name.c_str());
  std::exception_ptr error;
  {
    Entry here;
    Stream& s = current_stream(device);
    issue(s, name, {Kind::kernel}, [&] {
      try {
        run();
      } catch (...) {
        error = std::current_exception();
      }
    });
    finish({&s, s.issued, s.clock});
    if (!error) check_errors();
  }
  if (error) std::rethrow_exception(error);
}
std::string op_counts(bool waiting) {
  std::lock_guard<std::mutex> held(names_lock);
  std::string text;
  for (auto& [name, n] : waiting ? waiting_ops : issued_ops) text += name + " " + std::to_string(n) + "\n";
  return text;
}

// Memory at an address, for as long as somebody else keeps it.
TORCH_LIBRARY(sim, m) {
  m.def("memory(int address, int nbytes, int device) -> Tensor", [](int64_t address, int64_t nbytes, int64_t device) {
    auto there = at::TensorOptions(at::kByte).device(device_of(device));
    return at::for_blob(reinterpret_cast<void*>(address), {nbytes}).options(there).target_device(device_of(device)).make_tensor();
  });
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_local_scalar_dense", item);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  m.impl("zero_", zero);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}
}  // namespace sim
