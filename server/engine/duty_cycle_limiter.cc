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
  // The window bounds only the credit from before the step.
  const Instant begin = end - absl::ToChronoNanoseconds(busy);
  balance_ = BalanceAt(begin) - busy * (1 - share_);
  as_of_ = std::max(as_of_, end);
}

absl::Duration DutyCycleLimiter::Wait(Instant now) const {
  if (!paces()) return absl::ZeroDuration();
  // Rounded up to the clock's tick: after this wait the balance is not negative.
  return absl::Ceil(std::max(absl::ZeroDuration(), -BalanceAt(now) / share_), absl::Nanoseconds(1));
}

}  // namespace dorad::engine
