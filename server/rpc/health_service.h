// grpc.health.v1.Health: whether a listener and its services serve.
//
// Answers everybody, so its requests are the only ones of strangers that are read: they are small
// and come at once, or their calls end, which gRPC's own service would let stand for ever. (gRPC
// hands a message over when it has all of it; how much it holds until then only its quota bounds.)
// Nothing is logged nor counted. Owned by Server. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/rpc/late_service.h"
#include "server/rpc/message_deadlines.h"

namespace dorad::rpc {

inline constexpr int64_t kMaxHealthRequestBytes = 4096;
inline constexpr absl::Duration kHealthRequestTime = absl::Seconds(5);

class HealthService final : public LateService {
 public:
  // HealthCheckResponse.ServingStatus.
  enum class Status : uint32_t { kServing = 1, kNotServing = 2, kServiceUnknown = 3 };

  explicit HealthService(Services* services);
  ~HealthService() override;

  void Set(const std::string& service, bool serving) ABSL_LOCKS_EXCLUDED(mu_);
  Status Get(const std::string& service) const ABSL_LOCKS_EXCLUDED(mu_);
  // Watchers of now end, which would keep a server from ending; later ones end at once.
  void Shutdown() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Call;
  class CheckCall;
  class WatchCall;

  void Enter(const std::shared_ptr<Call>& watch) ABSL_LOCKS_EXCLUDED(mu_);
  void Leave(const std::shared_ptr<Call>& watch) ABSL_LOCKS_EXCLUDED(mu_);
  std::set<std::shared_ptr<Call>> Watchers() const ABSL_LOCKS_EXCLUDED(mu_);

  MessageDeadlines deadlines_{kHealthRequestTime};
  mutable absl::Mutex mu_;
  std::map<std::string, bool> serving_ ABSL_GUARDED_BY(mu_);
  std::set<std::shared_ptr<Call>> watchers_ ABSL_GUARDED_BY(mu_);
  bool shut_down_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::rpc
