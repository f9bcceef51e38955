#include "server/app/watchdog.h"

#include <algorithm>
#include <utility>

#include "server/platform/instant.h"
#include "server/platform/process/silence_meter.h"

namespace dorad {

Watchdog::Watchdog(absl::Duration limit, std::function<absl::Duration()> silence,
                   std::function<void()> on_stall) {
  const absl::Duration period = std::clamp(limit / 4, absl::Milliseconds(50), absl::Seconds(1));
  thread_ = std::thread(
      [this, limit, period, silence = std::move(silence), on_stall = std::move(on_stall)] {
        // Time in which the process was stopped is not the engine's.
        SilenceMeter meter(SteadyNow(), period);
        while (!stop_.WaitForNotificationWithTimeout(period)) {
          if (meter.Look(SteadyNow(), silence()) <= limit) continue;
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
