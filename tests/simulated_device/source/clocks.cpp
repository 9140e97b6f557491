#include "clocks.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>

#include "machine.h"

namespace sim {
namespace {
// The clock hangs on torch's thread-local state, which autograd hands from the thread that calls backward() to its own
// thread: both then move one clock, as one waits for the other.
struct HostClock final : c10::DebugInfoBase {
  double seconds = 0;
  int64_t era = 0;
};
std::atomic<int64_t> era{0};  // threads that nobody can reach begin anew with each
thread_local std::shared_ptr<HostClock> own;
thread_local int depth = 0;
thread_local double left_at = -1;

HostClock& kept_clock() {
  if (auto* found = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO)) return *static_cast<HostClock*>(found);
  if (!own) own = std::make_shared<HostClock>();
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO, own);
  return *own;
}
HostClock& clock_here() {
  auto& found = kept_clock();
  if (found.era != era) {
    found.era = era;
    found.seconds = 0;
  }
  return found;
}
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

struct Link {
  std::deque<Interval> busy[2];  // by direction, in order of their begin
};
Link links[kDevices];
constexpr size_t kRemembered = 4096;

void remember(std::deque<Interval>& busy, Interval used) {
  auto at = std::upper_bound(busy.begin(), busy.end(), used, [](auto& a, auto& b) { return a.begin < b.begin; });
  busy.insert(at, used);
  if (busy.size() > kRemembered) busy.pop_front();
}
// The interval of `busy` around `now`, or null; `until` falls to the next change.
const Interval* around(const std::deque<Interval>& busy, double now, double& until) {
  auto next = std::upper_bound(busy.begin(), busy.end(), now, [](double t, auto& b) { return t < b.begin; });
  if (next != busy.end()) until = std::min(until, next->begin);
  if (next == busy.begin() || std::prev(next)->end <= now) return nullptr;
  until = std::min(until, std::prev(next)->end);
  return &*std::prev(next);
}

Interval transfer(int device, int direction, double bytes, double alone, double other, double ready) {
  auto& link = links[device];
  double now = ready, begin = -1;
  std::vector<Interval> used;
  while (bytes > 0) {
    double until = 1e300;
    bool is_taken = around(link.busy[direction], now, until);
    bool is_shared = around(link.busy[1 - direction], now, until);
    double rate = is_taken ? 0 : is_shared ? std::max(0.0, profile().both_ways * (alone + other) - other) : alone;
    if (rate <= 1e-9 * alone) {  // a rounding of no rest is no rest
      now = until;
      continue;
    }
    double end = std::min(until, now + bytes / rate);
    if (begin < 0) begin = now;
    used.push_back({now, end});
    bytes = end < until ? 0 : bytes - (end - now) * rate;
    if (bytes < 1e-6) bytes = 0;
    now = end;
  }
  for (auto& piece : used) remember(link.busy[direction], piece);
  return {begin < 0 ? ready : begin, now};
}
}  // namespace

Profile& profile() {
  static auto* all = new Profile;
  return *all;
}
void reset_clocks() {
  ++era;
  for (auto& link : links) for (auto& busy : link.busy) busy.clear();
}

int64_t present_era() { return era; }
double host_clock() { return clock_here().seconds; }
void set_host_clock(double seconds) { clock_here().seconds = seconds; }
void spend_on_host(double seconds) {
  if (profile().is_on) clock_here().seconds += seconds;
}
void enter_clock() {
  if (depth++ || !profile().is_on || profile().measured <= 0) return;
  if (left_at >= 0) spend_on_host(profile().measured * (cpu_seconds() - left_at));
}
void leave_clock() {
  if (--depth == 0 && profile().is_on && profile().measured > 0) left_at = cpu_seconds();
}

Interval place(int device, const Cost& cost, double ready) {
  const auto& p = profile();
  auto over = [](double amount, double rate) { return rate > 0 ? amount / rate : 0; };
  switch (cost.kind) {
    case Kind::control:
      return {ready, ready};
    case Kind::kernel:
      return {ready, ready + p.launch + std::max(over(cost.flops, p.flops[cost.rate]), over(cost.bytes, p.memory))};
    case Kind::d2d:
      return {ready, ready + p.launch + over(2 * cost.bytes, p.memory)};
    default: {
      int direction = cost.kind == Kind::d2h;
      double rate = cost.pageable ? p.pageable : direction ? p.d2h : p.h2d;
      if (rate <= 0) return {ready, ready};
      return transfer(device, direction, cost.bytes, rate, direction ? p.h2d : p.d2h, ready);
    }
  }
}
}  // namespace sim
