#include "server/platform/net/poller.h"

#include <utility>

namespace dorad {

Poller::Poller(std::function<void()> poll, absl::Duration period)
    : thread_([this, period, poll = std::move(poll)] {
        while (!stop_.WaitForNotificationWithTimeout(period)) poll();
      }) {}

Poller::~Poller() {
  stop_.Notify();
  thread_.join();
}

}  // namespace dorad
