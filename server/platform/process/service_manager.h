// Reports the server's state to the service manager by systemd's notification protocol. A message
// is one datagram of VARIABLE=value lines to the socket in NOTIFY_SOCKET, a path or (with '@') an
// abstract name. Owned by the serve command. Thread-safe; no call waits or fails when the manager
// does not listen.
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
  // environment, so that no child process uses them. Call before other threads run.
  static std::unique_ptr<ServiceManager> FromEnvironment();
  // socket: as NOTIFY_SOCKET; "": no manager. watchdog: the longest time that the manager allows
  // between two keep-alives; zero: none expected.
  ServiceManager(const std::string& socket, absl::Duration watchdog);
  ~ServiceManager();

  void Ready(const std::string& status);
  void Reloading();
  void Stopping(const std::string& status);

  // From now on sends two keep-alives in the watchdog's time while alive() is true. No effect
  // without a watchdog. Call once.
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
