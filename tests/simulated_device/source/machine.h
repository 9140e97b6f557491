// What all parts share: the number of devices, the options, the one lock, and the calls that tests may watch or drop.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kPool = 32;  // as on CUDA, torch.Stream() hands out so many streams in turn

struct Options {
  std::atomic<int64_t> capacity[kDevices] = {int64_t(2) << 30, int64_t(2) << 30};
  std::atomic<int64_t> range_bytes{int64_t(1) << 40};  // addresses per device; read once, at the first use
  std::atomic<int64_t> lock_limit{int64_t(1) << 60};
  std::atomic<bool> poison{true}, segments{true}, compute{true};
  std::atomic<double> item{0};
};
Options& options();

// Calls of the host that a test may count, watch or drop. Those from `kEventSync` on block the host.
enum Call { kWait, kRecord, kRecordStream, kEventSync, kStreamSync, kDeviceSync, kItem, kBlockingCopy, kPageable, kOp, kAllocator, kCalls };

// Counts the call and tells whether it is to be dropped. Runs a watcher in Python: never call it under the lock.
bool is_dropped(Call call, int device, int64_t stream, const char* what = "");
using Watcher = int (*)(int call, int device, int64_t stream, const char* what);
void watch(Watcher watcher);
void drop(Call call, int64_t nth);
int64_t count(Call call);

// Every state is under this lock. No thread needs Python's lock while it holds this one: a thread that waits for this
// one may hold Python's.
std::recursive_mutex& machine_lock();

// Holds the lock, and moves the host thread's virtual clock by the time that it spent outside.
struct Entry {
  Entry();
  ~Entry();
  Entry(const Entry&) = delete;
  std::unique_lock<std::recursive_mutex> held;
};

// Mistakes that a real device would punish with wrong numbers at best.
void violate(std::string text);
std::vector<std::string> take_violations();

c10::Device device_of(int index);
int current_device();
void set_current_device(int index);
}  // namespace sim
