// Reports the server's state to the service manager by systemd's notification protocol. A message
// is one datagram of VARIABLE=value lines to the socket that NOTIFY_SOCKET names, a path or (with
// '@') an abstract name. Owned by the serve command. Thread-safe; no call waits or fails when the
// manager does not listen.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/platform/net/unique_fd.h"

namespace dorad {

class ServiceManager {
 public:
  // Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID and removes them from this process's
  // environment, so that no child speaks for the server. To be called before other threads run.
  static std::unique_ptr<ServiceManager> FromEnvironment();
  // socket: as NOTIFY_SOCKET; "": there is no manager. watchdog: the longest time between two signs
  // of life that the manager allows; zero: it expects none.
  ServiceManager(const std::string& socket, absl::Duration watchdog);
  ~ServiceManager();

  void Ready(const std::string& status);
  void Reloading();
  void Stopping(const std::string& status);

  // From now on sends a sign of life twice in the watchdog's time, as long as alive() is true. Does
  // nothing without a watchdog. To be called once.
  void KeepAlive(std::function<bool()> alive);

 private:
  void Send(const std::string& message) const;

  UniqueFd socket_;
  std::string address_;  // as in sockaddr_un
  const absl::Duration watchdog_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace dorad
