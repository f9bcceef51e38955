#include "server/security/poller.h"

#include <utility>

namespace dorad::security {

Poller::Poller(std::function<void()> poll, absl::Duration period)
    : thread_([this, period, poll = std::move(poll)] {
        while (!stop_.WaitForNotificationWithTimeout(period)) poll();
      }) {}

Poller::~Poller() {
  stop_.Notify();
  thread_.join();
}

}  // namespace dorad::security
