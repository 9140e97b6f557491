#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "addresses.h"
#include "streams.h"

namespace sim {
namespace {
using c10::CachingDeviceAllocator::DeviceStats;
constexpr size_t kRound = 512, kSmall = size_t(1) << 20, kSmallSegment = size_t(2) << 20, kLarge = size_t(10) << 20,
                 kLargeSegment = size_t(20) << 20, kRoundLarge = size_t(2) << 20;

struct Block {
  size_t offset = 0, size = 0, requested = 0;
  Stream* stream = nullptr;
  bool is_small = false, is_live = false, is_deferred = false;
  bool is_fresh = true;  // nothing has been written there, not even poison
  uint64_t serial = 0;
  Block *before = nullptr, *next = nullptr;  // in its segment
  std::set<Stream*> uses;
  std::vector<Mark> marks;
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->offset < b->offset;
  }
};
using Pool = std::set<Block*, BySize>;

std::string size_text(size_t n) {
  char text[32];
  if (n >> 30) snprintf(text, sizeof text, "%.2f GiB", n / 1073741824.0);
  else if (n >> 20) snprintf(text, sizeof text, "%.2f MiB", n / 1048576.0);
  else if (n >> 10) snprintf(text, sizeof text, "%.2f KiB", n / 1024.0);
  else snprintf(text, sizeof text, "%zu bytes", n);
  return text;
}

// The memory of one device. All of its methods are called under the lock.
struct Heap {
  int device = 0;
  Pool pools[2];                            // large, small
  std::map<size_t, size_t> unused;          // addresses in no segment: offset -> size
  std::map<size_t, Block*> blocks;          // all, by offset
  std::vector<Block*> deferred;
  struct Leaving {
    Mark mark;
    size_t offset, size;
  };
  std::vector<Leaving> leaving;
  size_t reserved = 0;
  uint64_t serial = 0;
  DeviceStats stats;

  using Stats = c10::CachingAllocator::StatArray;
  void count(Stats& stat, bool is_small, int64_t amount) {
    for (int i : {0, is_small ? 1 : 2}) amount >= 0 ? stat[i].increase(amount) : stat[i].decrease(-amount);
  }

  void poison(Block& b) {
    if (!options().poison || !options().compute) return;
    char* at = range_of(device).alias + b.offset;
    issue(*b.stream, "poison", {}, [at, n = b.size] { memset(at, 0xff, n); });
    b.is_fresh = false;
  }

  // -- segments ---------------------------------------------------------------------------------------------
  size_t segment_size(size_t size) {
    if (!options().segments) return size;
    return size <= kSmall ? kSmallSegment : size < kLarge ? kLargeSegment : (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
  }
  Block* new_segment(size_t size, Stream* stream, bool is_small) {
    size_t n = segment_size(size);
    if (reserved + n > size_t(options().capacity[device].load())) return nullptr;
    if (!range_of(device).nbytes) return nullptr;
    if (blocks.empty() && unused.empty() && leaving.empty()) unused[0] = range_of(device).nbytes;
    for (auto it = unused.begin(); it != unused.end(); ++it) {
      if (it->second < n) continue;
      auto* b = new Block;
      b->offset = it->first, b->size = n, b->stream = stream, b->is_small = is_small;
      if (it->second > n) unused[it->first + n] = it->second - n;
      unused.erase(it);
      blocks[b->offset] = b;
      grow(*b, 1);
      return b;
    }
    return nullptr;
  }
  void grow(const Block& segment, int sign) {
    reserved += sign * segment.size;
    count(stats.segment, segment.is_small, sign);
    count(stats.reserved_bytes, segment.is_small, sign * int64_t(segment.size));
    sign > 0 ? ++stats.num_device_alloc : ++stats.num_device_free;
  }
  void give_back(Block* b) {
    grow(*b, -1);
    forget(device, b->offset, b->size);
    blocks.erase(b->offset);
    free_addresses(b->offset, b->size);
    delete b;
  }
  void free_addresses(size_t offset, size_t size) {
    auto at = unused.emplace(offset, size).first;
    auto after = std::next(at);
    if (after != unused.end() && at->first + at->second == after->first) at->second += after->second, unused.erase(after);
    if (at != unused.begin()) {
      auto ahead = std::prev(at);
      if (ahead->first + ahead->second == at->first) ahead->second += at->second, unused.erase(at);
    }
  }
  // Without segments: the stream's own free blocks become free bytes at once, as what the stream does next comes after
  // their last use; their addresses and pages go when it has got there.
  void shed(Stream* stream) {
    for (auto& pool : pools)
      for (auto* b : std::vector<Block*>(pool.begin(), pool.end())) {
        if (b->stream != stream || stream->is_private) continue;
        pool.erase(b);
        grow(*b, -1);
        blocks.erase(b->offset);
        issue(*stream, "give back", {}, [device = device, offset = b->offset, n = b->size] { forget(device, offset, n); });
        leaving.push_back({{stream, stream->issued, stream->clock}, b->offset, b->size});
        delete b;
      }
  }
  // Waits for all blocks that streams still use, as the driver waits for the device, and gives back whole segments.
  void flush() {
    for (auto* b : deferred) for (auto& mark : b->marks) finish(mark);
    settle();
    bool any = false;
    for (auto& pool : pools)
      for (auto* b : std::vector<Block*>(pool.begin(), pool.end())) {
        if (b->before || b->next || b->stream->is_private) continue;
        if (!any) finish_all(device);
        any = true;
        pool.erase(b);
        give_back(b);
      }
  }

  // -- blocks -----------------------------------------------------------------------------------------------
  void split(Block* b, size_t size) {
    auto* rest = new Block;
    rest->offset = b->offset + size, rest->size = b->size - size, rest->stream = b->stream, rest->is_small = b->is_small;
    rest->is_fresh = b->is_fresh;
    if (options().segments) {
      rest->before = b, rest->next = b->next;
      if (b->next) b->next->before = rest;
      b->next = rest;
      count(stats.inactive_split, b->is_small, 1);
      count(stats.inactive_split_bytes, b->is_small, rest->size);
    } else {
      count(stats.segment, b->is_small, 1);
    }
    b->size = size;
    blocks[rest->offset] = rest;
    pools[rest->is_small].insert(rest);
  }
  bool is_free(Block* b) { return b && !b->is_live && !b->is_deferred; }
  // `b` takes the block behind it.
  void join(Block* b) {
    Block* rest = b->next;
    b->size += rest->size, b->next = rest->next, b->is_fresh = b->is_fresh && rest->is_fresh;
    if (rest->next) rest->next->before = b;
    blocks.erase(rest->offset);
    delete rest;
  }
  void count_split(Block* b, int sign) {
    if (!b->before && !b->next) return;
    count(stats.inactive_split, b->is_small, sign);
    count(stats.inactive_split_bytes, b->is_small, sign * int64_t(b->size));
  }
  void to_pool(Block* b) {
    count(stats.active, b->is_small, -1);
    count(stats.active_bytes, b->is_small, -int64_t(b->size));
    poison(*b);
    b->is_live = b->is_deferred = false;
    if (is_free(b->next)) count_split(b->next, -1), pools[b->is_small].erase(b->next), join(b);
    if (is_free(b->before)) {
      b = b->before;
      count_split(b, -1), pools[b->is_small].erase(b), join(b);
    }
    count_split(b, 1);
    pools[b->is_small].insert(b);
  }
  void settle() {
    std::erase_if(leaving, [this](Leaving& l) {
      if (l.mark.stream->done < l.mark.seq) return false;
      free_addresses(l.offset, l.size);
      return true;
    });
    std::vector<Block*> kept;
    for (auto* b : deferred) {
      bool past = true;
      for (auto& mark : b->marks) past = past && is_past(mark);
      if (!past) {
        kept.push_back(b);
        continue;
      }
      b->marks.clear();
      to_pool(b);
    }
    deferred.swap(kept);
  }
  Block* cached(size_t size, Stream* stream, bool is_small) {
    Block key;
    key.stream = stream, key.size = size;
    auto& pool = pools[is_small];
    auto it = pool.lower_bound(&key);
    if (it == pool.end() || (*it)->stream != stream) return nullptr;
    Block* b = *it;
    pool.erase(it);
    count_split(b, -1);
    return b;
  }
  Block* found(size_t n, Stream* stream, bool again) {
    size_t size = std::max(kRound, (n + kRound - 1) / kRound * kRound);
    bool is_small = size <= kSmall;
    settle();
    Block* b = cached(size, stream, is_small);
    if (!b) {
      if (again) ++stats.num_alloc_retries;
      b = new_segment(size, stream, is_small);
      if (!b && !options().segments) {
        shed(stream);
        b = new_segment(size, stream, is_small);
      }
    }
    if (!b) return nullptr;
    size_t least = options().segments && !is_small ? kSmall + 1 : kRound;
    if (b->size - size >= least) split(b, size);
    b->is_live = true, b->requested = n, b->serial = ++serial;
    if (b->is_fresh) poison(*b);
    b->is_fresh = false;
    count(stats.allocation, is_small, 1);
    count(stats.active, is_small, 1);
    count(stats.allocated_bytes, is_small, b->size);
    count(stats.active_bytes, is_small, b->size);
    count(stats.requested_bytes, is_small, n);
    return b;
  }
  void release(size_t offset) {
    Block* b = blocks.at(offset);
    count(stats.allocation, b->is_small, -1);
    count(stats.allocated_bytes, b->is_small, -int64_t(b->size));
    count(stats.requested_bytes, b->is_small, -int64_t(b->requested));
    b->is_live = false;
    if (b->uses.empty()) return to_pool(b);
    b->is_deferred = true;
    for (auto* s : b->uses) b->marks.push_back({s, s->issued, s->clock});
    b->uses.clear();
    deferred.push_back(b);
  }
};
Heap& heap_of(int device) {
  static auto* all = [] {
    auto* made = new Heap[kDevices];
    for (int d = 0; d < kDevices; ++d) made[d].device = d;
    return made;
  }();
  return all[device];
}

void free_device(void* p) {
  if (!p) return;
  Entry here;
  int d = device_at(p);
  heap_of(d).release(static_cast<char*>(p) - range_of(d).device);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    int device = current_device();
    auto whole = device_of(device);
    if (!n) return {nullptr, nullptr, &free_device, whole};
    auto& heap = heap_of(device);
    Block* b = nullptr;
    Stream* stream = nullptr;
    {
      Entry here;
      range_of(device);
      stream = &current_stream(device);
      if (stream->recorded) stream = stream->memory;
      b = heap.found(n, stream, false);
    }
    if (!b) {
      is_dropped(kAllocator, device, stream->id, "memory is given back");
      Entry here;
      if (!stream->is_private) {  // while work is recorded, nothing goes back to the driver
        heap.flush();
        b = heap.found(n, stream, true);
      }
      if (!b) {
        ++heap.stats.num_ooms;
        size_t total = options().capacity[device], used = heap.stats.allocated_bytes[0].current;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size_text(n), ". Device ", device,
            " has a total capacity of ", size_text(total), " of which ", size_text(total > heap.reserved ? total - heap.reserved : 0),
            " is free. Of the reserved memory ", size_text(used), " is allocated, and ", size_text(heap.reserved - used),
            " is reserved but unallocated.");
      }
    }
    void* p = range_of(device).device + b->offset;
    return {p, p, &free_device, whole};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t n) const override {
    int device = device_at(to);
    void *a = alias_at(to), *b = alias_at(from);
    Entry here;
    issue(current_stream(device), "copy_data", {Kind::d2d, double(n)}, [=] { memcpy(a, b, n); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int d = 0; d < kDevices; ++d) {
      is_dropped(kAllocator, d, -1, "empty_cache");
      Entry here;
      heap_of(d).flush();
    }
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override { record_use(p.get(), s); }
  DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    Entry here;
    return heap_of(d).stats;
  }
  template <class F> void each_stat(int d, F f) {
    Entry here;
    auto& s = heap_of(d).stats;
    for (auto* stats : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                        &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& stat : *stats) f(stat);
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {
    each_stat(d, [](auto& stat) { stat.reset_accumulated(); });
    heap_of(d).stats.num_alloc_retries = heap_of(d).stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex d) override { each_stat(d, [](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Entry here;
    size_t total = options().capacity[d];
    return {total > heap_of(d).reserved ? total - heap_of(d).reserved : 0, total};
  }
};
struct RegisterMemory {
  RegisterMemory() { c10::SetAllocator(kType, &device_memory()); }
} registered_memory;
}  // namespace

c10::DeviceAllocator& device_memory() {
  static auto* all = new DeviceMemory;
  return *all;
}
void record_use(const void* p, const c10::Stream& s) {
  if (!p || is_dropped(kRecordStream, s.device_index(), s.id())) return;
  Entry here;
  int d = device_at(p);
  if (d < 0) return;
  auto& blocks = heap_of(d).blocks;
  auto it = blocks.upper_bound(static_cast<const char*>(p) - range_of(d).device);
  if (it == blocks.begin()) return;
  Block* b = std::prev(it)->second;
  Stream* used = &stream_at(s.device_index(), s.id());
  if (b->is_live && b->stream != used) b->uses.insert(used);
}

BlockNote describe(int device, size_t offset) {
  BlockNote note;
  auto& lock = machine_lock();
  bool held = false;
  for (int i = 0; i < 1000000 && !held; ++i) held = lock.try_lock();
  if (!held) return note;
  auto& blocks = heap_of(device).blocks;
  auto it = blocks.upper_bound(offset);
  if (it != blocks.begin()) {
    const Block& b = *std::prev(it)->second;
    if (b.serial && offset < b.offset + b.size) note = {true, b.is_live, b.is_live ? b.requested : b.size, b.stream->id, b.serial};
  }
  lock.unlock();
  return note;
}
}  // namespace sim
