// Detects a listener of this server that no longer accepts connections. Requests on old connections
// cannot detect that, so a thread connects to each listener regularly. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace dorad {

class ListenerHealthCheck {
 public:
  struct Listener {
    std::string address;
    std::string greeting;  // as ProbeListener's
  };
  // Calls on_unresponsive once, on its own thread, after three failures in a row of one listener.
  ListenerHealthCheck(absl::Duration period, std::vector<Listener> listeners,
                      std::function<void()> on_unresponsive);
  // Waits for a running check.
  ~ListenerHealthCheck();

  // on_unresponsive is not called after this. Does not wait. Call once.
  void Stop() { stop_.Notify(); }

 private:
  void Run(absl::Duration period);

  const std::vector<Listener> listeners_;
  const std::function<void()> on_unresponsive_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
