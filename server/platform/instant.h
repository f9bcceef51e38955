// A monotonic clock for deadlines and durations. Pure functions and therefore thread-safe.
#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace dorad {

using Instant = std::chrono::steady_clock::time_point;

inline Instant SteadyNow() { return std::chrono::steady_clock::now(); }
inline absl::Duration Between(Instant from, Instant to) { return absl::FromChrono(to - from); }
// REQUIRES: `after` is below a century.
inline Instant FromNow(absl::Duration after) {
  return SteadyNow() + absl::ToChronoNanoseconds(after);
}
inline absl::Duration Since(Instant from) { return Between(from, SteadyNow()); }

}  // namespace dorad
