// Spaces steps out so that they take a share of the time and leave the rest of it to others. Knows
// nothing of steps but how long they took, and no clock but what it is told. Confined to the engine
// thread; owned by EngineLoop.
#pragma once

#include "absl/time/time.h"
#include "server/engine/request.h"

namespace dorad::engine {

class DutyCycleLimiter {
 public:
  // So much time that was left over, by an idle engine or a late wake-up, may be made up for.
  static constexpr absl::Duration kWindow = absl::Milliseconds(50);

  // Below 1 the device can only be left alone when nothing is in flight.
  bool paces() const { return share_ < 1; }
  double share() const { return share_; }
  // With another share, what was owed or left over is forgotten. REQUIRES: 0 < share <= 1.
  void SetShare(double share, Instant now);

  // A step was computed for `busy` until `end`.
  void Ran(absl::Duration busy, Instant end);
  // From `now` until the next step may begin; zero: it may.
  absl::Duration Wait(Instant now) const;

 private:
  absl::Duration BalanceAt(Instant now) const;

  double share_ = 1;
  // The time that steps may take as of `as_of_`, which grows by `share_` a second; below zero it is
  // owed.
  absl::Duration balance_;
  Instant as_of_;
};

}  // namespace dorad::engine
