#include "server/engine/duty_cycle_limiter.h"

#include <algorithm>

#include "server/platform/check.h"

namespace dorad::engine {

void DutyCycleLimiter::SetShare(double share, Instant now) {
  DORAD_CHECK(share > 0 && share <= 1);
  if (share == share_) return;
  share_ = share;
  balance_ = absl::ZeroDuration();
  as_of_ = now;
}

absl::Duration DutyCycleLimiter::BalanceAt(Instant now) const {
  const absl::Duration passed = std::max(absl::ZeroDuration(), Between(as_of_, now));
  return std::min(balance_ + passed * share_, kWindow * share_);
}

void DutyCycleLimiter::Ran(absl::Duration busy, Instant end) {
  if (!paces()) return;
  // What grows while the step runs is not left over: only what was there before it is bounded.
  const Instant begin = end - absl::ToChronoNanoseconds(busy);
  balance_ = BalanceAt(begin) - busy * (1 - share_);
  as_of_ = std::max(as_of_, end);
}

absl::Duration DutyCycleLimiter::Wait(Instant now) const {
  if (!paces()) return absl::ZeroDuration();
  // A whole number of the clock's ticks: who waits so long finds that it was enough.
  return absl::Ceil(std::max(absl::ZeroDuration(), -BalanceAt(now) / share_), absl::Nanoseconds(1));
}

}  // namespace dorad::engine
