// Calls a function about once a second, on its own thread, until it is destroyed. Owned by the
// object that it polls for. Thread-safe.
#pragma once

#include <functional>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace dorad {

class Poller {
 public:
  explicit Poller(std::function<void()> poll, absl::Duration period = absl::Seconds(1));
  // Waits for a running call.
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

 private:
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
