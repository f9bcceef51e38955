// The running server: owns every component, in the order of their dependencies. Owned by main.
// Start, Reload and Stop are called by one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "server/platform/config/config.h"

namespace dorad {

class App {
 public:
  // Loads the model and the preloaded adapters and serves. The status's message starts with the
  // component that failed. `on_unresponsive` is called, at most once and on its own thread, when a
  // listener stops accepting connections (server.listener_check_seconds).
  static absl::StatusOr<std::unique_ptr<App>> Start(const Config& given,
                                                    std::function<void()> on_unresponsive);
  // Aborts all work that Stop has left.
  ~App();

  // "dorad ready grpc=HOST:PORT metrics=http://HOST:PORT/metrics".
  std::string ReadyLine() const;

  // Whether the engine makes progress. Any thread.
  bool alive() const;

  // Applies the reloadable keys, and logs the keys that need a restart. An unreadable or invalid
  // configuration changes nothing.
  void Reload(const absl::StatusOr<Config>& config);

  // Health turns NOT_SERVING; after server.drain_delay_seconds refuses new requests, lets running
  // ones finish within server.drain_timeout_seconds, closes. A notification of `hurry` ends running
  // requests with their tokens so far. Ends the process when the shutdown hangs, also later, in the
  // destructor.
  void Stop(const absl::Notification& hurry);

 private:
  struct Impl;
  explicit App(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
