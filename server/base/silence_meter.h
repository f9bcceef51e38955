// How long somebody has been silent while this process ran, for whoever looks regularly.
//
// A process that was stopped (SIGSTOP, a machine that slept) looks late. Nobody could show that he
// lives meanwhile: a look adds a period to the silence at most. Owned by whoever looks. Not
// thread-safe.
#pragma once

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/base/instant.h"

namespace dorad {

class SilenceMeter {
 public:
  // period: between two looks, when nothing comes in between.
  SilenceMeter(Instant now, absl::Duration period) : period_(period), looked_(now) {}

  // The silence as of now; `since_sign`: how long ago the last sign of life was.
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
