// The metrics listener: GET /metrics (Prometheus text, with gzip for clients that accept it), GET
// /healthz and /readyz.
//
// A small server over SocketServer. Clients that send single bytes can block the threads of a
// library for ever; here every connection has a deadline, and a new connection replaces the oldest
// one when all places are taken. prometheus-cpp's own Exposer cannot start in a process linked to
// cuBLASLt. One request a connection. Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace dorad {

class MetricsHttpServer {
 public:
  // Called on the server's thread, one at a time: they must not block.
  struct Handlers {
    std::function<std::string()> metrics;
    std::function<bool()> alive;  // engine heartbeat
    std::function<bool()> ready;
  };
  // listen: host:port, port 0 picks one. Half-open and slow connections are closed after a few
  // seconds and never block others. UNAVAILABLE (PORT_IN_USE, LISTEN_FAILED), INVALID_ARGUMENT
  // (LISTEN_ADDRESS).
  static absl::StatusOr<std::unique_ptr<MetricsHttpServer>> Start(const std::string& listen,
                                                                  Handlers handlers);
  // Closes every connection and joins the thread.
  ~MetricsHttpServer();

  // host:port with the port in effect.
  const std::string& address() const;

 private:
  struct Impl;
  explicit MetricsHttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
