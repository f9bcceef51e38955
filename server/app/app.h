// The running server: owns every part, in the order of their dependencies.
// Owned by main. Start, Reload and Stop are called by one thread.
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
  // Loads the model and the preloaded adapters and serves. The status names what was wrong; its
  // message starts with the part that failed.
  // `on_unresponsive` is called, once at most and on a thread of its own, when a listener takes no
  // connections any more (server.listener_check_seconds).
  static absl::StatusOr<std::unique_ptr<App>> Start(const Config& given,
                                                    std::function<void()> on_unresponsive);
  // Ends at once what Stop has not ended.
  ~App();

  // "dorad ready grpc=HOST:PORT metrics=http://HOST:PORT/metrics".
  std::string ReadyLine() const;

  // Whether the engine shows signs of life. Any thread.
  bool alive() const;

  // Takes over what may change while the server runs, and says in the log what needs a restart. A
  // configuration that could not be read, or with which a start would fail, changes nothing.
  void Reload(const absl::StatusOr<Config>& config);

  // Not ready any more; after server.drain_delay_seconds refuses new requests, lets running ones
  // finish within server.drain_timeout_seconds, closes. Once `hurry` is notified running requests
  // are ended with what they have, and nothing but that is waited for. Ends the process when
  // something hangs, also later, in the destructor.
  void Stop(const absl::Notification& hurry);

 private:
  struct Impl;
  explicit App(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
