// Notices that a listener of this server takes no connections any more, which requests on old
// connections do not: connects to each of them now and then, as a stranger would. Owned by App.
// Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace dorad {

class SelfDial {
 public:
  struct Listener {
    std::string address;
    std::string greeting;  // as ProbeListener's
  };
  // Calls on_deaf once, on its own thread, when a listener has been silent three times in a row.
  SelfDial(absl::Duration period, std::vector<Listener> listeners, std::function<void()> on_deaf);
  // Waits for a try that is under way.
  ~SelfDial();

  // Never calls on_deaf from now on; does not wait. Once.
  void Stop() { stop_.Notify(); }

 private:
  void Run(absl::Duration period);

  const std::vector<Listener> listeners_;
  const std::function<void()> on_deaf_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
