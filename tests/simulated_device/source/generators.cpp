#include "generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

#include "machine.h"

namespace sim {
namespace {
struct SimGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit SimGenerator(int device) : GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override { seed_ = s, offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::Tensor(at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt));
    auto* p = static_cast<uint64_t*>(t.mutable_data_ptr());
    p[0] = seed_, p[1] = offset_;
    return t.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& s) override {
    TORCH_CHECK(s.numel() == 16, "sim: the state of a generator has 16 bytes");
    auto* p = static_cast<const uint64_t*>(s.data());
    seed_ = p[0], offset_ = p[1];
  }
  SimGenerator* clone_impl() const override {
    auto* g = new SimGenerator(device().index());
    g->seed_ = seed_, g->offset_ = offset_;
    return g;
  }
  static c10::DeviceType device_type() { return kType; }
};
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
}  // namespace

at::Generator new_generator(int device) { return at::make_generator<SimGenerator>(device < 0 ? current_device() : device); }
const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new at::Generator[kDevices];
    for (int d = 0; d < kDevices; ++d) made[d] = new_generator(d);
    return made;
  }();
  TORCH_CHECK(device < kDevices, "sim: invalid device ordinal ", device);
  return all[device < 0 ? current_device() : device];
}
at::Generator draw(int device, const std::optional<at::Generator>& given) {
  auto g = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(g.device().type() == kType, "Expected a 'sim' device type for generator but found '", g.device().type(), "'");
  std::lock_guard<std::mutex> held(g.mutex());
  auto* impl = g.get<SimGenerator>();
  uint64_t seed = mixed(impl->seed_ ^ mixed(impl->offset_));
  impl->offset_ += 4;
  return at::detail::createCPUGenerator(seed);
}
void generator_state(int device, uint64_t* state, bool is_set) {
  auto g = default_generator(device);
  std::lock_guard<std::mutex> held(g.mutex());
  auto* impl = g.get<SimGenerator>();
  if (is_set) impl->seed_ = state[0], impl->offset_ = state[1];
  else state[0] = impl->seed_, state[1] = impl->offset_;
}
}  // namespace sim
