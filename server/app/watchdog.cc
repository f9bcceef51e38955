#include "server/app/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace dorad {

Watchdog::Watchdog(absl::Duration limit, std::function<absl::Duration()> silence,
                   std::function<void()> on_stall) {
  const absl::Duration period = std::clamp(limit / 4, absl::Milliseconds(50), absl::Seconds(1));
  thread_ = std::thread(
      [this, limit, period, silence = std::move(silence), on_stall = std::move(on_stall)] {
        auto looked = std::chrono::steady_clock::now();
        while (!stop_.WaitForNotificationWithTimeout(period)) {
          const auto now = std::chrono::steady_clock::now();
          const absl::Duration passed = absl::FromChrono(now - std::exchange(looked, now));
          // A process that was stopped, or a machine that slept, does not make the engine guilty:
          // it has a period's time to show that it lives.
          if (passed > period + limit / 2) continue;
          if (silence() <= limit) continue;
          on_stall();
          return;
        }
      });
}

Watchdog::~Watchdog() {
  stop_.Notify();
  thread_.join();
}

}  // namespace dorad
