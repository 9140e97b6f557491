#include "machine.h"

#include <c10/util/Exception.h>

#include "clocks.h"

namespace sim {
namespace {
std::atomic<int64_t> counts[kCalls];
std::atomic<int64_t> faulty[kCalls];
std::atomic<Watcher> watcher{nullptr};
std::vector<std::string> violations;
thread_local int device = 0;
struct NoFaults {
  NoFaults() { for (auto& nth : faulty) nth = -1; }
} no_faults;
}  // namespace

Options& options() {
  static auto* all = new Options;
  return *all;
}

bool is_dropped(Call call, int device, int64_t stream, const char* what) {
  bool dropped = counts[call]++ == faulty[call];
  if (auto* found = watcher.load()) dropped = found(call, device, stream, what) != 0 || dropped;
  return dropped;
}
void watch(Watcher found) { watcher = found; }
void drop(Call call, int64_t nth) {
  counts[call] = 0;
  faulty[call] = nth;
}
int64_t count(Call call) { return counts[call]; }

std::recursive_mutex& machine_lock() {
  static auto* lock = new std::recursive_mutex;
  return *lock;
}
Entry::Entry() : held(machine_lock()) { enter_clock(); }
Entry::~Entry() { leave_clock(); }

void violate(std::string text) { violations.push_back(std::move(text)); }
std::vector<std::string> take_violations() {
  std::vector<std::string> taken;
  taken.swap(violations);
  return taken;
}

c10::Device device_of(int index) { return {kType, c10::DeviceIndex(index)}; }
int current_device() { return device; }
void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim: invalid device ordinal ", index);
  device = index;
}
}  // namespace sim
