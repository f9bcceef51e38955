// Spaces steps out so that they take a share of the time. The caller passes the duration of each
// step and the current time. Confined to the engine thread; owned by EngineLoop.
#pragma once

#include "absl/time/time.h"
#include "server/engine/request.h"

namespace dorad::engine {

class DutyCycleLimiter {
 public:
  // The longest unused time (idle engine, late wake-up) that later steps may catch up on.
  static constexpr absl::Duration kWindow = absl::Milliseconds(50);

  // Below 1 steps do not overlap: otherwise the device would never be idle.
  bool paces() const { return share_ < 1; }
  double share() const { return share_; }
  // A new share resets the balance. REQUIRES: 0 < share <= 1.
  void SetShare(double share, Instant now);

  // A step ran for `busy` and ended at `end`.
  void Ran(absl::Duration busy, Instant end);
  // Time from `now` to the next permitted step; zero: now.
  absl::Duration Wait(Instant now) const;

 private:
  absl::Duration BalanceAt(Instant now) const;

  double share_ = 1;
  // Step time available at `as_of_`; grows by `share_` a second. Negative: debt.
  absl::Duration balance_;
  Instant as_of_;
};

}  // namespace dorad::engine
