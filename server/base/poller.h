// Does something about once a second, on a thread of its own, until it ends. Thread-safe.
#pragma once

#include <functional>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace dorad {

class Poller {
 public:
  explicit Poller(std::function<void()> poll, absl::Duration period = absl::Seconds(1));
  // Waits for the poll at hand.
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

 private:
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
