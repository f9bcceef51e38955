// Notices that a listener of this server takes no new connections any more. Requests on old
// connections cannot notice that, so a thread connects to each listener now and then. Owned by App.
// Thread-safe.
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
  // Calls on_unresponsive once, on its own thread, when a listener has been silent three times in a
  // row.
  ListenerHealthCheck(absl::Duration period, std::vector<Listener> listeners,
                      std::function<void()> on_unresponsive);
  // Waits for the try that is under way.
  ~ListenerHealthCheck();

  // After this on_unresponsive is not called any more. Does not wait. To be called once.
  void Stop() { stop_.Notify(); }

 private:
  void Run(absl::Duration period);

  const std::vector<Listener> listeners_;
  const std::function<void()> on_unresponsive_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
