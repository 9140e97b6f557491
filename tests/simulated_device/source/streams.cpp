#include "streams.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <optional>

#include "allocator.h"

namespace sim {
namespace {
Stream* all_streams() {
  static auto* all = [] {
    auto* made = new Stream[kDevices * (kPool + 1)];
    for (int d = 0; d < kDevices; ++d)
      for (int i = 0; i <= kPool; ++i) made[d * (kPool + 1) + i].device = d, made[d * (kPool + 1) + i].id = i;
    return made;
  }();
  return all;
}
thread_local int64_t current[kDevices] = {};
std::atomic<int64_t> handed_out[kDevices];
std::string first_error;
bool spans_on = false;
std::string spans;

// Kernels run as on a thread of their own: below autograd, modes and autocast of the thread that happens to run them,
// and with one core, as the bits of a product depend on how many share it.
struct Bare {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet({c10::DispatchKey::BackendSelect}),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::AutoGradMode no_grad{false};
  int threads = at::get_num_threads();
  Bare() { if (threads != 1) at::set_num_threads(1); }
  ~Bare() { if (threads != 1) at::set_num_threads(threads); }
};

void run_head(Stream& s) {
  Task task = std::move(s.tasks.front());
  s.tasks.pop_front();
  if (task.run) {
    Bare bare;
    try {
      task.run();
    } catch (const std::exception& e) {
      if (first_error.empty()) first_error = task.name + ": " + e.what();
    }
    task.run = nullptr;
  }
  ++s.done;
}
bool is_ready(const Stream& s) {
  if (s.tasks.empty()) return false;
  const Mark& mark = s.tasks.front().awaited;
  return !mark.stream || mark.stream->done >= mark.seq;
}
// Runs all that early streams may run by now.
void pump() {
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < kDevices * (kPool + 1); ++i) {
      Stream& s = all_streams()[i];
      while (s.order == Order::early && is_ready(s)) run_head(s), moved = true;
    }
  }
}
// Early streams run ahead after each task, also of a late stream that is made to run.
void run_until(Stream& s, int64_t seq) {
  while (s.done < seq) {
    const Mark mark = s.tasks.front().awaited;
    if (mark.stream && mark.stream->done < mark.seq) {
      run_until(*mark.stream, mark.seq);
      continue;
    }
    run_head(s);
    pump();
  }
}
void put(Stream& s, Task task) {
  s.tasks.push_back(std::move(task));
  ++s.issued;
  if (s.order == Order::early && s.tasks.size() == 1 && !is_ready(s)) return;
  if (s.order == Order::seeded && s.dice() % 4 == 0)
    for (auto n = 1 + s.dice() % s.tasks.size(); n && is_ready(s); --n) run_head(s);
  if (s.order != Order::late) pump();
}
}  // namespace

Stream& stream_at(int device, int64_t id) {
  TORCH_CHECK(device >= 0 && device < kDevices && id >= 0 && id <= kPool, "sim: no stream ", id, " of device ", device);
  return all_streams()[device * (kPool + 1) + id];
}
Stream& current_stream(int device) { return stream_at(device, current[device]); }
int64_t new_stream(int device) { return 1 + handed_out[device]++ % kPool; }
void set_order(int device, int64_t id, Order order, uint64_t seed) {
  for (int d = 0; d < kDevices; ++d)
    for (int i = 0; i <= kPool; ++i) {
      if ((device >= 0 && d != device) || (id >= 0 && i != id)) continue;
      Stream& s = stream_at(d, i);
      s.order = order;
      s.dice.seed(seed * 1000003 + d * 1009 + i);
    }
  pump();
}

namespace {
void check_not_recorded(const Stream& s) {
  TORCH_CHECK(!s.recorded, "sim: a stream whose work is recorded can't wait, and nothing can wait for it");
}
void begin_work(Stream& s, std::string name, const Cost& cost, std::function<void()> run) {
  if (profile().is_on) {
    auto taken = place(s.device, cost, std::max(s.clock, host_clock()));
    s.clock = taken.end;
    if (spans_on && cost.kind != Kind::control) {
      char line[256];
      snprintf(line, sizeof line, "%d %ld %.12g %.12g %.0f %.0f ", s.device, long(s.id), taken.begin, taken.end, cost.bytes, cost.flops);
      spans += line + name + "\n";
    }
  }
  if (!options().compute) run = nullptr;
  put(s, {std::move(name), std::move(run), {}});
}
}  // namespace
void issue(Stream& s, std::string name, const Cost& cost, std::function<void()> run) {
  if (s.is_private && !s.recorded) return;  // memory of a recording that has ended is freed: nothing runs there
  if (profile().is_on && cost.kind != Kind::control) spend_on_host(profile().issue);
  if (s.recorded) {
    s.recorded->push_back({std::move(name), cost, std::move(run), nullptr});
    return;
  }
  begin_work(s, std::move(name), cost, std::move(run));
}
void begin_recording(Stream& s, Stream& memory, Recorded& recorded) {
  check_not_recorded(s);
  s.recorded = memory.recorded = &recorded;
  s.memory = &memory;
}
void end_recording(Stream& s) {
  s.memory->recorded = s.recorded = nullptr;
  s.memory = nullptr;
}
void replay(Stream& s, const Recorded& recorded) {
  check_not_recorded(s);
  if (profile().is_on) spend_on_host(profile().issue);
  for (const auto& work : recorded) begin_work(s, work.name, work.cost, work.drawn ? work.drawn() : work.run);
}
Mark record(Stream& s) {
  check_not_recorded(s);
  if (profile().is_on) {
    spend_on_host(profile().control);
    s.clock = std::max(s.clock, host_clock());
  }
  return {&s, s.issued, s.clock};
}
void wait(Stream& s, const Mark& mark) {
  check_not_recorded(s);
  spend_on_host(profile().control);
  s.clock = std::max(s.clock, mark.time());
  put(s, {"wait", nullptr, mark});
}
bool is_past(const Mark& mark) {
  if (!profile().is_on) return mark.stream->done >= mark.seq;
  if (mark.time() > host_clock()) return false;
  run_until(*mark.stream, mark.seq);
  return true;
}
bool query(const Mark& mark) {
  if (!mark.stream || is_past(mark)) return true;
  if (profile().is_on) {
    spend_on_host(1e-6);  // a loop over queries takes time
  } else if (is_ready(*mark.stream)) {
    run_head(*mark.stream);
  } else {
    run_until(*mark.stream, mark.stream->done + 1);
  }
  pump();
  return false;
}
void finish(const Mark& mark) {
  if (!mark.stream) return;
  check_not_recorded(*mark.stream);
  run_until(*mark.stream, mark.seq);
  pump();
  if (profile().is_on) set_host_clock(std::max(host_clock(), mark.time()) + profile().sync);
}
void finish_all(int device) {
  double last = host_clock();
  for (int i = 0; i <= kPool; ++i) {
    Stream& s = stream_at(device, i);
    run_until(s, s.issued);
    last = std::max(last, s.clock);
  }
  pump();
  if (profile().is_on) set_host_clock(last + profile().sync);
}
void check_errors() {
  std::string text;
  std::swap(text, first_error);
  TORCH_CHECK(text.empty(), "sim: asynchronous error in ", text);
}
void record_spans(bool on) {
  spans_on = on;
  spans.clear();
}
std::string take_spans() {
  std::string taken;
  taken.swap(spans);
  return taken;
}

namespace {
Mark& mark_of(void* event) { return *static_cast<Mark*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    set_current_device(d.index() < 0 ? old.index() : d.index());
    return old;
  }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device d) const override { set_current_device(d.index() < 0 ? current_device() : d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device(d.index() < 0 ? current_device() : d.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static int index(c10::Device d) { return d.index() < 0 ? current_device() : d.index(); }
  static c10::Stream made(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device_of(device), id); }
  static Stream& at(const c10::Stream& s) { return stream_at(s.device_index(), s.id()); }
  c10::Stream getStream(c10::Device d) const override { return made(index(d), current[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return made(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override { return made(index(d), new_stream(index(d))); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = current[s.device_index()];
    current[s.device_index()] = s.id();
    return made(s.device_index(), old);
  }

  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(e); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    bool dropped = is_dropped(kRecord, s.device_index(), s.id());
    Entry here;
    if (!*e) *e = new Mark;
    if (!dropped) mark_of(*e) = sim::record(at(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (!e || is_dropped(kWait, s.device_index(), s.id())) return;
    Entry here;
    if (mark_of(e).stream) sim::wait(at(s), mark_of(e));
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    Entry here;
    return query(mark_of(e));
  }
  bool queryStream(const c10::Stream& s) const override {
    Entry here;
    return query({&at(s), at(s).issued, at(s).clock});
  }
  void synchronizeStream(const c10::Stream& s) const override {
    bool dropped = is_dropped(kStreamSync, s.device_index(), s.id());
    Entry here;
    if (!dropped) finish({&at(s), at(s).issued, at(s).clock});
    check_errors();
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    Stream* stream = mark_of(e).stream;
    bool dropped = is_dropped(kEventSync, stream ? stream->device : -1, stream ? stream->id : -1);
    Entry here;
    if (!dropped) finish(mark_of(e));
    check_errors();
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    int device = d < 0 ? current_device() : d;
    bool dropped = is_dropped(kDeviceSync, device, -1);
    Entry here;
    if (!dropped) finish_all(device);
    check_errors();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { record_use(p.get(), s); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    Entry here;
    for (void* e : {a, b})  // as CUDA, which knows no time of what hasn't happened
      TORCH_CHECK(e && mark_of(e).stream && is_past(mark_of(e)), "the device has not come to this event yet");
    return 1e3 * (mark_of(b).time() - mark_of(a).time());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}  // namespace
}  // namespace sim
