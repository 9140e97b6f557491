// Virtual time: how long work would take on a card that a profile describes, on clocks of streams and host threads.
//
// All is decided when work is issued, from the order of issue alone, so times don't depend on when tasks really run.
// Copies of one direction take turns at the link. While both directions are under way, the link moves `both_ways` of
// the sum of both rates: the copy that was issued first keeps its own rate, the later one gets the rest. So the sum of
// bytes over a time is that of the profile, and no copy that was scheduled changes its end.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sim {
enum class Kind { kernel, h2d, d2h, d2d, control };
enum Rate { kFloat32, kTensorFloat32, kHalf };

struct Cost {
  Kind kind = Kind::control;
  double bytes = 0, flops = 0;
  Rate rate = kFloat32;
  bool pageable = false;
};

// Rates of zero take no time.
struct Profile {
  double flops[3] = {0, 0, 0};                // per second, by `Rate`
  double memory = 0;                          // bytes per second
  double launch = 0;                          // seconds that each kernel takes beyond its work
  double h2d = 0, d2h = 0, pageable = 0;      // bytes per second
  double both_ways = 1;                       // of the sum of h2d and d2h, 0.5 to 1
  double sync = 0;                            // seconds of the host after what it waited for
  double issue = 0, control = 0;              // seconds of the host per kernel or copy, per event
  double measured = 0;                        // host seconds per second of CPU time between calls; 0 counts none
  bool is_on = false;
};
Profile& profile();
void reset_clocks();  // of host threads and of the devices' links; streams have their own

int64_t present_era();  // counts the beginnings of the clocks
double host_clock();
void set_host_clock(double seconds);
void spend_on_host(double seconds);
void enter_clock();
void leave_clock();
// While it lives, the thread's time is the simulator's own and doesn't count as the host's.
struct Uncounted {
  Uncounted() { enter_clock(); }
  ~Uncounted() { leave_clock(); }
};

struct Interval {
  double begin, end;
};
// The time of work that may begin at `ready`.
Interval place(int device, const Cost& cost, double ready);
}  // namespace sim
