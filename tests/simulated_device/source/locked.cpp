#include "locked.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>
#include <stdlib.h>

#include <cstring>
#include <map>
#include <vector>

namespace sim {
namespace {
struct Copy {
  Mark mark;
  bool is_written;
};
struct Registration {
  size_t nbytes;
  std::vector<Copy> copies;
};
std::map<uintptr_t, Registration> registrations;
size_t total = 0;
int64_t calls = 0, failing = -1;
int failing_code = kNoMemory;

Registration* around(uintptr_t at, uintptr_t* begin = nullptr) {
  auto it = registrations.upper_bound(at);
  if (it == registrations.begin()) return nullptr;
  --it;
  if (at >= it->first + it->second.nbytes) return nullptr;
  if (begin) *begin = it->first;
  return &it->second;
}
bool is_pending(const Copy& copy) { return copy.mark.stream->done < copy.mark.seq; }
}  // namespace

int lock_range(uintptr_t at, size_t nbytes) {
  Entry here;
  if (calls++ == failing) return failing_code;
  if (!at || !nbytes) return kInvalidValue;
  auto next = registrations.lower_bound(at);
  if (around(at) || (next != registrations.end() && next->first < at + nbytes)) return kAlreadyLocked;
  if (total + nbytes > size_t(options().lock_limit.load())) return kNoMemory;
  registrations[at] = {nbytes, {}};
  total += nbytes;
  return kLocked;
}
int unlock_range(uintptr_t at) {
  Entry here;
  auto it = registrations.find(at);
  if (it == registrations.end()) return kNotLocked;
  for (auto& copy : it->second.copies) {
    if (!is_pending(copy)) continue;
    char text[128];
    snprintf(text, sizeof text, "host memory at 0x%zx was unlocked with a copy %s the device pending", size_t(at), copy.is_written ? "from" : "to");
    violate(text);
    finish(copy.mark);  // as the driver does
  }
  total -= it->second.nbytes;
  registrations.erase(it);
  return kLocked;
}
void fail_lock(int64_t nth, int code) {
  Entry here;
  failing = nth < 0 ? -1 : calls + nth;
  failing_code = code;
}
size_t locked_bytes() {
  Entry here;
  return total;
}
bool is_locked(const void* p) {
  Entry here;
  return around(reinterpret_cast<uintptr_t>(p)) != nullptr;
}
bool is_range_locked(const void* p, size_t nbytes) {
  uintptr_t begin = 0, at = reinterpret_cast<uintptr_t>(p);
  auto* found = around(at, &begin);
  TORCH_CHECK(!found || at + nbytes <= begin + found->nbytes, "sim error: invalid argument (a copy of ", nbytes,
      " bytes begins in page-locked memory and ends outside of that registration)");
  return found != nullptr;
}
void note_copy(const void* p, size_t, const Mark& mark, bool is_written) {
  auto* found = around(reinterpret_cast<uintptr_t>(p));
  if (!found) return;
  auto& copies = found->copies;
  if (copies.size() > 64) std::erase_if(copies, [](auto& copy) { return !is_pending(copy); });
  copies.push_back({mark, is_written});
}

// -- torch's own page-locked tensors ---------------------------------------------------------------------------
namespace {
struct Freed {
  void* p;
  std::vector<Copy> copies;
};
std::vector<Freed> freed;  // waits until the device is done with it, as in torch's caching allocator

void reclaim() {
  std::erase_if(freed, [](Freed& f) {
    for (auto& copy : f.copies) if (is_pending(copy)) return false;
    free(f.p);
    return true;
  });
}
void free_host(void* p) {
  if (!p) return;
  Entry here;
  auto it = registrations.find(reinterpret_cast<uintptr_t>(p));
  if (it == registrations.end()) return;
  freed.push_back({p, std::move(it->second.copies)});
  total -= it->second.nbytes;
  registrations.erase(it);
  reclaim();
}
struct HostMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) {
      TORCH_CHECK(!posix_memalign(&p, 4096, n), "sim: no host memory");
      int code = lock_range(reinterpret_cast<uintptr_t>(p), n);
      if (code) free(p);
      TORCH_CHECK(!code, "sim error: ", code == kNoMemory ? "out of memory" : "invalid argument", " (page-locked host memory)");
    }
    return {p, p, &free_host, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void* p, void*, c10::Stream s) override {
    Entry here;
    auto& stream = stream_at(s.device_index(), s.id());
    note_copy(p, 1, {&stream, stream.issued, stream.clock}, false);
    return true;
  }
  void empty_cache() override {
    Entry here;
    reclaim();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
}  // namespace
HostMemory& host_memory() {
  static auto* all = new HostMemory;
  return *all;
}
}  // namespace sim
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &sim::host_memory())
