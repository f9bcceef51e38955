// The metrics listener: GET /metrics (Prometheus text), GET /healthz and /readyz. cpp-httplib inside
// (prometheus-cpp's own Exposer cannot start in a process linked to cuBLASLt).
// Owned by App. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace dorad {

class MetricsHttpServer {
 public:
  struct Handlers {
    std::function<std::string()> metrics;
    std::function<bool()> alive;  // engine heartbeat
    std::function<bool()> ready;
  };
  // listen: host:port, port 0 picks one. Half-open and slow connections are closed after a few
  // seconds and never keep others from being served. UNAVAILABLE (PORT_IN_USE), INVALID_ARGUMENT.
  static absl::StatusOr<std::unique_ptr<MetricsHttpServer>> Start(const std::string& listen,
                                                                  Handlers handlers);
  ~MetricsHttpServer();

  // host:port with the port in effect.
  const std::string& address() const;

 private:
  struct Impl;
  explicit MetricsHttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dorad
