#include "server/app/self_dial.h"

#include <utility>

#include "server/base/listener_probe.h"
#include "server/base/log.h"

namespace dorad {
namespace {

constexpr int kMaxFailures = 3;
// A busy machine answers late, a deaf listener never.
constexpr absl::Duration kPatience = absl::Seconds(10);

}  // namespace

SelfDial::SelfDial(absl::Duration period, std::vector<Listener> listeners,
                   std::function<void()> on_deaf)
    : listeners_(std::move(listeners)),
      on_deaf_(std::move(on_deaf)),
      thread_([this, period] { Run(period); }) {}

SelfDial::~SelfDial() {
  if (!stop_.HasBeenNotified()) Stop();
  thread_.join();
}

void SelfDial::Run(absl::Duration period) {
  std::vector<int> failures(listeners_.size(), 0);
  while (!stop_.WaitForNotificationWithTimeout(period)) {
    for (size_t i = 0; i < listeners_.size(); ++i) {
      const absl::Status status =
          ProbeListener(listeners_[i].address, listeners_[i].greeting, kPatience);
      if (stop_.HasBeenNotified()) return;
      failures[i] = status.ok() ? 0 : failures[i] + 1;
      if (status.ok()) continue;
      LogWarning("a listener takes no connections",
                 {{"error", std::string(status.message())}, {"times", int64_t{failures[i]}}});
      if (failures[i] < kMaxFailures) continue;
      LogError("a listener takes no connections any more; ending the process",
               {{"listener", listeners_[i].address}});
      on_deaf_();
      return;
    }
  }
}

}  // namespace dorad
