// grpc.health.v1.Health: whether a listener and its services serve.
//
// It needs no authentication, so only its requests are read from unknown callers. Their size and
// time are bounded; gRPC's own service would wait for ever. (gRPC passes only whole messages on;
// incoming_bytes.h bounds the memory until then.) Not logged or counted. Owned by Server.
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpc/health/v1/health.pb.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/raw_service.h"

namespace dorad::rpc {

inline constexpr int64_t kMaxHealthRequestBytes = 4096;
inline constexpr absl::Duration kHealthRequestTime = absl::Seconds(5);

class HealthService final : public RawService {
 public:
  using Status = grpc::health::v1::HealthCheckResponse;

  // deadlines: of kHealthRequestTime, borrowed.
  HealthService(Services* services, MessageDeadlines* deadlines);
  ~HealthService() override;

  void Set(const std::string& service, bool serving) ABSL_LOCKS_EXCLUDED(mu_);
  Status::ServingStatus Get(const std::string& service) const ABSL_LOCKS_EXCLUDED(mu_);
  // Ends all watches, which would block a shutdown; later ones end at once.
  void Shutdown() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Watch;

  absl::Status Check(const UnaryPtr<Status>& call,
                     const grpc::health::v1::HealthCheckRequest& request);
  // UNAVAILABLE: the server is ending.
  absl::Status Enter(const std::shared_ptr<Watch>& watch) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(const std::shared_ptr<Watch>& watch) ABSL_LOCKS_EXCLUDED(mu_);
  std::set<std::shared_ptr<Watch>> Watches() const ABSL_LOCKS_EXCLUDED(mu_);

  mutable absl::Mutex mu_;
  std::map<std::string, bool> serving_ ABSL_GUARDED_BY(mu_);
  std::set<std::shared_ptr<Watch>> watches_ ABSL_GUARDED_BY(mu_);
  bool shut_down_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::rpc
