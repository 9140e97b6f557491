// Streams: queues of tasks that run in order, when the test's order for the stream says so. There are no threads.
//
// A task runs on the host thread whose call made it due, under the lock:
//   early   as soon as what it waits for has run;
//   late    when a host synchronisation, or a task of another stream that waits for it, demands it;
//   seeded  at an issue to its stream whose dice say so, or when it is demanded.
// A query that answers no makes one task run, so that a loop over queries ends.
#pragma once
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "clocks.h"
#include "machine.h"

namespace sim {
enum class Order { early, late, seeded };
struct Stream;

// A point between two tasks of a stream. Its time is 0 once the clocks have begun anew.
struct Mark {
  Stream* stream = nullptr;
  int64_t seq = 0;
  double issued_at = 0;
  int64_t era = present_era();
  double time() const { return era == present_era() ? issued_at : 0; }
};
// Work that was recorded instead of issued, to be issued again as often as one likes (a CUDA graph). What draws random
// numbers has no `run`: `drawn` makes one at each issue.
struct Work {
  std::string name;
  Cost cost;
  std::function<void()> run;
  std::function<std::function<void()>()> drawn;
};
using Recorded = std::vector<Work>;
struct Task {
  std::string name;
  std::function<void()> run;
  Mark awaited;
};
struct Stream {
  int device = 0;
  int64_t id = 0;
  std::deque<Task> tasks;
  int64_t issued = 0, done = 0;
  Order order = Order::early;
  std::mt19937_64 dice;
  double clock = 0;
  // While work is recorded: where it goes, and whose memory it takes. That memory is nobody else's (a private pool).
  Recorded* recorded = nullptr;
  Stream* memory = nullptr;
  bool is_private = false;
};

Stream& stream_at(int device, int64_t id);
Stream& current_stream(int device);
int64_t new_stream(int device);
void set_order(int device, int64_t id, Order order, uint64_t seed);  // -1: all devices, all streams

// All of these are called under the lock, by way of an Entry.
void issue(Stream& stream, std::string name, const Cost& cost, std::function<void()> run);
void begin_recording(Stream& stream, Stream& memory, Recorded& recorded);
void end_recording(Stream& stream);
void replay(Stream& stream, const Recorded& recorded);
Mark record(Stream& stream);
void wait(Stream& stream, const Mark& mark);
bool is_past(const Mark& mark);              // for the allocator; by virtual time where a profile is set
bool query(const Mark& mark);                // for the host
void finish(const Mark& mark);               // the host waits; moves its clock
void finish_all(int device);
void check_errors();                         // raises the first error of a task that ran

// Spans of virtual time, while a test asks for them: "device stream begin end bytes flops name" a line.
void record_spans(bool on);
std::string take_spans();
}  // namespace sim
