// Detects an engine without progress. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace dorad {

class Watchdog {
 public:
  // Calls on_stall once, on its own thread, when `silence` exceeds `limit`. `silence` returns the
  // time since the last progress. Time in which the process was stopped does not count.
  Watchdog(absl::Duration limit, std::function<absl::Duration()> silence,
           std::function<void()> on_stall);
  // Stops watching.
  ~Watchdog();

 private:
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
