// Measures the time since a thread's last sign of progress, without the time in which this process
// was stopped (SIGSTOP, a machine that slept).
//
// The owner calls Look regularly. After a stop its call is late, so one call adds at most one
// period to the silence. Not thread-safe.
#pragma once

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/platform/instant.h"

namespace dorad {

class SilenceMeter {
 public:
  // period: the time between two calls of Look in a process that is not stopped.
  SilenceMeter(Instant now, absl::Duration period) : period_(period), looked_(now) {}

  // Returns the silence up to `now`; `since_sign`: the time since the last sign of progress.
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
