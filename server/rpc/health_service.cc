#include "server/rpc/health_service.h"

#include <utility>

#include "server/rpc/server_stream_call.h"

namespace dorad::rpc {
namespace {

absl::Status Ending() { return absl::UnavailableError("the server is ending"); }

}  // namespace

// One Watch call: the current status, and each change; a slow reader skips intermediate ones. Lock
// order: the call's, then the service's.
class HealthService::Watch final : public ServerStreamCall {
 public:
  Watch(const Method& method, grpc::CallbackServerContext* context, Services* services,
        HealthService* service)
      : ServerStreamCall(method, context, services), service_(service) {}

  using ServerStreamCall::Pump;

 private:
  std::shared_ptr<Watch> Self() { return std::static_pointer_cast<Watch>(shared_from_this()); }

  absl::Status OnMessage(grpc::ByteBuffer* bytes) override {
    grpc::health::v1::HealthCheckRequest request;
    DORAD_RETURN_IF_ERROR(Parse(bytes, &request));
    {
      absl::MutexLock lock(&mu_);
      name_ = std::move(*request.mutable_service());
    }
    DORAD_RETURN_IF_ERROR(service_->Enter(Self()));
    Pump();
    return absl::OkStatus();
  }

  Turn Next() override {
    const Status::ServingStatus now = service_->Get(name_);
    // UNKNOWN means that nothing was sent yet.
    if (response_.status() == now) return {};
    response_.set_status(now);
    return {.message = &response_};
  }

  void Release() override { service_->Leave(Self()); }

  HealthService* const service_;
  std::string name_ ABSL_GUARDED_BY(mu_);
  Status response_ ABSL_GUARDED_BY(mu_);  // the last one sent
};

HealthService::HealthService(Services* services, MessageDeadlines* deadlines)
    : RawService("grpc.health.v1.Health", services, deadlines, /*is_probe=*/true) {
  AddUnary("Check", &HealthService::Check, AtMost<kMaxHealthRequestBytes>);
  AddStream<Watch>("Watch", AtMost<kMaxHealthRequestBytes>, this);
}

HealthService::~HealthService() = default;

absl::Status HealthService::Check(const UnaryPtr<Status>& call,
                                  const grpc::health::v1::HealthCheckRequest& request) {
  const Status::ServingStatus status = Get(request.service());
  if (status == Status::SERVICE_UNKNOWN) {
    return absl::NotFoundError("this listener has no such service");
  }
  return call->Answer([status](Status* to) {
    to->set_status(status);
    return absl::OkStatus();
  });
}

void HealthService::Set(const std::string& service, bool serving) {
  {
    absl::MutexLock lock(&mu_);
    serving_[service] = serving;
  }
  for (const auto& watch : Watches()) watch->Pump();
}

HealthService::Status::ServingStatus HealthService::Get(const std::string& service) const {
  absl::MutexLock lock(&mu_);
  const auto found = serving_.find(service);
  if (found == serving_.end()) return Status::SERVICE_UNKNOWN;
  return found->second ? Status::SERVING : Status::NOT_SERVING;
}

void HealthService::Shutdown() {
  {
    absl::MutexLock lock(&mu_);
    shut_down_ = true;
  }
  for (const auto& watch : Watches()) watch->Abandon(Ending());
}

absl::Status HealthService::Enter(const std::shared_ptr<Watch>& watch) {
  absl::MutexLock lock(&mu_);
  if (shut_down_) return Ending();
  watches_.insert(watch);
  return absl::OkStatus();
}

void HealthService::Leave(const std::shared_ptr<Watch>& watch) {
  absl::MutexLock lock(&mu_);
  watches_.erase(watch);
}

std::set<std::shared_ptr<HealthService::Watch>> HealthService::Watches() const {
  absl::MutexLock lock(&mu_);
  return watches_;
}

}  // namespace dorad::rpc
