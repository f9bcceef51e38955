#include "server/app/listener_health_check.h"

#include <utility>

#include "server/platform/log.h"
#include "server/platform/net/listener_probe.h"

namespace dorad {
namespace {

constexpr int kMaxFailures = 3;
// A busy machine answers late, an unresponsive listener never.
constexpr absl::Duration kPatience = absl::Seconds(10);

}  // namespace

ListenerHealthCheck::ListenerHealthCheck(absl::Duration period, std::vector<Listener> listeners,
                                         std::function<void()> on_unresponsive)
    : listeners_(std::move(listeners)),
      on_unresponsive_(std::move(on_unresponsive)),
      thread_([this, period] { Run(period); }) {}

ListenerHealthCheck::~ListenerHealthCheck() {
  if (!stop_.HasBeenNotified()) Stop();
  thread_.join();
}

void ListenerHealthCheck::Run(absl::Duration period) {
  std::vector<int> failures(listeners_.size(), 0);
  while (!stop_.WaitForNotificationWithTimeout(period)) {
    for (size_t i = 0; i < listeners_.size(); ++i) {
      const absl::Status status =
          ProbeListener(listeners_[i].address, listeners_[i].greeting, kPatience);
      if (stop_.HasBeenNotified()) return;
      failures[i] = status.ok() ? 0 : failures[i] + 1;
      if (status.ok()) continue;
      LogWarning("a listener accepts no connections",
                 {{"error", std::string(status.message())}, {"times", int64_t{failures[i]}}});
      if (failures[i] < kMaxFailures) continue;
      LogError("a listener accepts no connections any more; ending the process",
               {{"listener", listeners_[i].address}});
      on_unresponsive_();
      return;
    }
  }
}

}  // namespace dorad
