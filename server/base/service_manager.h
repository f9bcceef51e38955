// Tells the service manager how the server is: systemd's notification protocol, spoken by hand. A
// message is one datagram of VARIABLE=value lines to the socket that NOTIFY_SOCKET names, a path or
// (with '@') an abstract name. Owned by main. Thread-safe; nothing waits, and nobody is harmed by a
// manager that does not listen.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/base/unique_fd.h"

namespace dorad {

class ServiceManager {
 public:
  // Of this process's environment: NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID. Takes them out of
  // it, so that no child speaks for the server. To be called before other threads run.
  static std::unique_ptr<ServiceManager> FromEnvironment();
  // socket: as NOTIFY_SOCKET; "" is nobody. watchdog: how long the manager waits for KeepAlive;
  // zero: it does not.
  ServiceManager(const std::string& socket, absl::Duration watchdog);
  ~ServiceManager();

  void Ready(const std::string& status);
  void Reloading();
  void Stopping(const std::string& status);

  // From now on says twice in a watchdog's time that the server lives, as long as alive() does.
  // Once; without a watchdog nothing.
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
