// What torch asks of an accelerator beyond memory, streams and kernels.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include "addresses.h"
#include "allocator.h"
#include "generators.h"
#include "locked.h"

namespace sim {
namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d = -1) const override { return new_generator(d); }
  at::Device getDeviceFromPtr(void* p) const override { return device_of(std::max(0, device_at(p))); }
  bool isPinnedPtr(const void* p) const override { return is_locked(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto old = getCurrentDevice();
    set_current_device(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return d < 0 ? getCurrentDevice() : exchangeDevice(d); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard there(s.device());
    auto fresh = device_memory().allocate(n);
    if (size_t both = std::min(n, s.nbytes())) device_memory().copy_data(fresh.get(), s.data(), both);
    const_cast<c10::Storage&>(s).set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
struct RegisterHooks {
  RegisterHooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }
} registered_hooks;
}  // namespace
}  // namespace sim
