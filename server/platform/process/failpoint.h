// Named points at which a test makes the program fail: the process dies as by kill -9, or the
// thread throws, hangs, or continues after five seconds.
//
// Nothing happens unless a point is armed, in dorad by the environment variable DORAD_FAILPOINT.
// docs/development.md lists the points. Thread-safe once armed.
#pragma once

#include <atomic>
#include <string_view>

#include "absl/status/status.h"

namespace dorad {

// Arms the point: "NAME", or "NAME:N" for its N-th use; with "=kill" (the default), "=throw",
// "=hang" or "=delay" behind it. Once, before other threads run. INVALID_ARGUMENT (USAGE) for any
// other form.
absl::Status ArmFailpoint(std::string_view spec);

namespace internal {
extern std::atomic<bool> failpoint_armed;
// True when the armed point has been reached often enough.
bool FailpointDue(std::string_view name);
// Dies, throws, hangs or waits, as armed.
void GoWrong();
}  // namespace internal

// Fails as armed when `name` is due, after last_act().
template <typename LastAct>
void Failpoint(std::string_view name, LastAct&& last_act) {
  if (!internal::failpoint_armed.load(std::memory_order_relaxed)) return;
  if (!internal::FailpointDue(name)) return;
  last_act();
  internal::GoWrong();
}

inline void Failpoint(std::string_view name) {
  Failpoint(name, [] {});
}

}  // namespace dorad
