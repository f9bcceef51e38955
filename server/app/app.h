// The running server: every part, in the order in which they stand on each other.
// Owned by main. Start and Stop are called by one thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/config.h"

namespace dorad {

class App {
 public:
  // Loads the model and the preloaded adapters and serves. The status names what was wrong; its
  // message starts with the part that failed.
  static absl::StatusOr<std::unique_ptr<App>> Start(Config config);
  // Ends at once what Stop has not ended.
  ~App();

  // "dorad ready grpc=HOST:PORT metrics=http://HOST:PORT/metrics".
  std::string ReadyLine() const;

  // Refuses new requests, lets running ones finish within server.drain_timeout_seconds, closes.
  void Stop();

 private:
  struct Impl;
  explicit App(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
