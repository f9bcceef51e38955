// Measures for how long a thread has given no sign of life, not counting the time in which this
// process was stopped (SIGSTOP, a machine that slept).
//
// The owner looks regularly. After a stop its look comes late, so a look adds one period to the
// silence at most. Not thread-safe.
#pragma once

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/platform/instant.h"

namespace dorad {

class SilenceMeter {
 public:
  // period: the time between two looks of a process that is not stopped.
  SilenceMeter(Instant now, absl::Duration period) : period_(period), looked_(now) {}

  // Returns the silence up to `now`; `since_sign`: the time since the last sign of life.
  absl::Duration Look(Instant now, absl::Duration since_sign) {
    const absl::Duration passed = Between(std::exchange(looked_, now), now);
    silence_ = std::min(since_sign, silence_ + std::min(passed, period_));
    return silence_;
  }

 private:
  const absl::Duration period_;
  Instant looked_;
  absl::Duration silence_;
};

}  // namespace dorad
