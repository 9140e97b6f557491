// What Python calls, by ctypes.
#include <cstring>

#include "addresses.h"
#include "generators.h"
#include "kernels.h"
#include "locked.h"

using namespace sim;
namespace {
const char* kept(std::string text) {
  static thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}
}  // namespace

extern "C" {
void sim_load(int64_t range_bytes) {
  options().range_bytes = range_bytes;
  range_of(0);
  install_fault_handler();
}
int sim_option(const char* key, double value) {
  auto& o = options();
  std::string k = key;
  if (k == "capacity:0") o.capacity[0] = int64_t(value);
  else if (k == "capacity:1") o.capacity[1] = int64_t(value);
  else if (k == "lock_limit") o.lock_limit = int64_t(value);
  else if (k == "poison") o.poison = value != 0;
  else if (k == "segments") o.segments = value != 0;
  else if (k == "compute") o.compute = value != 0;
  else if (k == "item") o.item = value;
  else return 1;
  return 0;
}
void sim_order(int device, int64_t stream, int order, uint64_t seed) {
  Entry here;
  set_order(device, stream, Order(order), seed);
}
void sim_drop(int call, int64_t nth) { drop(Call(call), nth); }
int64_t sim_count(int call) { return count(Call(call)); }
void sim_watch(Watcher watcher) { watch(watcher); }
const char* sim_violations() {
  Entry here;
  std::string text;
  for (auto& line : take_violations()) text += line + "\n";
  return kept(text);
}
int sim_lock(uintptr_t at, size_t nbytes) { return lock_range(at, nbytes); }
int sim_unlock(uintptr_t at) { return unlock_range(at); }
void sim_fail_lock(int64_t nth, int code) { fail_lock(nth, code); }
int64_t sim_locked_bytes() { return int64_t(locked_bytes()); }
int64_t sim_range_bytes(int device) { return int64_t(range_of(device).nbytes); }
void sim_generator(int device, int is_set, uint64_t* state) { generator_state(device, state, is_set); }
const char* sim_ops(int waiting) { return kept(op_counts(waiting)); }
int sim_profile(const char* key, double value) {
  Entry here;
  auto& p = profile();
  std::string k = key;
  if (k == "fp32") p.flops[kFloat32] = value;
  else if (k == "tf32") p.flops[kTensorFloat32] = value;
  else if (k == "half") p.flops[kHalf] = value;
  else if (k == "memory") p.memory = value;
  else if (k == "launch") p.launch = value;
  else if (k == "h2d") p.h2d = value;
  else if (k == "d2h") p.d2h = value;
  else if (k == "pageable") p.pageable = value;
  else if (k == "both_ways") p.both_ways = value;
  else if (k == "sync") p.sync = value;
  else if (k == "issue") p.issue = value;
  else if (k == "control") p.control = value;
  else if (k == "measured") p.measured = value;
  else if (k == "is_on") p.is_on = value != 0;
  else return 1;
  return 0;
}
void sim_reset_clocks() {
  Entry here;
  reset_clocks();
  for (int d = 0; d < kDevices; ++d) for (int i = 0; i <= kPool; ++i) stream_at(d, i).clock = 0;
  set_host_clock(0);
}
double sim_host_clock() {
  Entry here;
  return host_clock();
}
void sim_set_host_clock(double seconds) {
  Entry here;
  set_host_clock(seconds);
}
double sim_stream_clock(int device, int64_t stream) {
  Entry here;
  return stream_at(device, stream).clock;
}
int64_t sim_pending(int device, int64_t stream) {
  Entry here;
  auto& s = stream_at(device, stream);
  return s.issued - s.done;
}
// The memory of recordings, which stays theirs until it is dropped; its free segments then go back with the others.
void* sim_private_memory(int device) {
  auto* made = new Stream;
  made->device = device, made->is_private = true;
  return made;
}
void sim_drop_memory(void* memory) {
  Entry here;
  static_cast<Stream*>(memory)->is_private = false;  // blocks refer to it by address: it stays
}
void* sim_begin_recording(int device, void* memory) {
  Entry here;
  auto* made = new Recorded;
  begin_recording(current_stream(device), *static_cast<Stream*>(memory), *made);
  return made;
}
void sim_end_recording(int device) {
  Entry here;
  end_recording(current_stream(device));
}
int64_t sim_recorded(void* recorded) { return int64_t(static_cast<Recorded*>(recorded)->size()); }
void sim_replay(int device, void* recorded) {
  Entry here;
  replay(current_stream(device), *static_cast<Recorded*>(recorded));
}
void sim_drop_recorded(void* recorded) { delete static_cast<Recorded*>(recorded); }
void sim_spans(int on) {
  Entry here;
  record_spans(on);
}
const char* sim_take_spans() {
  Entry here;
  return kept(take_spans());
}
}
