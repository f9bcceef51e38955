#include "server/rpc/health_service.h"

#include <google/protobuf/wrappers.pb.h>

#include <optional>
#include <utility>

#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/status.h"

namespace dorad::rpc {
namespace {

// On the wire HealthCheckRequest is a text with number 1 and HealthCheckResponse a number with
// number 1, as these are.
using Request = google::protobuf::StringValue;
using Response = google::protobuf::UInt32Value;
using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, Response>;

constexpr char kCheck[] = "Check";
constexpr char kWatch[] = "Watch";

Response Encode(HealthService::Status status) {
  Response response;
  response.set_value(static_cast<uint32_t>(status));
  return response;
}

}  // namespace

// One Check. Kept alive by gRPC until OnDone.
class HealthService::CheckCall final : public Reactor,
                                       public std::enable_shared_from_this<CheckCall> {
 public:
  static Reactor* Start(HealthService* service) {
    auto call = std::make_shared<CheckCall>(service);
    call->self_ = call;
    call->timer_.Start([weak = std::weak_ptr(call)] {
      if (const auto self = weak.lock()) self->End(MessageTimedOut());
    });
    call->StartRead(&call->bytes_);
    return call.get();
  }

  explicit CheckCall(HealthService* service) : service_(service), timer_(&service->deadlines_) {}

  void OnReadDone(bool ok) override {
    timer_.Stop();
    Guarded(
        kCheck,
        [&] {
          if (!ok) return End(RequestMissing());
          Request request;
          absl::Status status = ParseRequest(&bytes_, kMaxHealthRequestBytes, &request);
          if (!status.ok()) return End(status);
          const HealthService::Status found = service_->Get(request.value());
          if (found == HealthService::Status::kServiceUnknown) {
            return End(absl::NotFoundError("this listener has no such service"));
          }
          absl::MutexLock lock(&mu_);
          if (std::exchange(ended_, true)) return;
          response_ = Encode(found);
          StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
        },
        [this](const absl::Status& status) { End(status); });
  }
  void OnDone() override { auto self = std::move(self_); }

 private:
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    if (!std::exchange(ended_, true)) Finish(ToGrpc(status));
  }

  HealthService* const service_;
  std::shared_ptr<CheckCall> self_;
  grpc::ByteBuffer bytes_;
  MessageTimer timer_;
  Response response_;
  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

// One Watch: the status now, and whenever it is another one; what a slow reader has not taken is
// passed over. Kept alive by gRPC until OnDone. Lock order: the service's mutex is never held when
// its own is acquired.
class HealthService::WatchCall final : public Reactor,
                                       public std::enable_shared_from_this<WatchCall> {
 public:
  static Reactor* Start(HealthService* service) {
    auto call = std::make_shared<WatchCall>(service);
    call->self_ = call;
    call->timer_.Start([weak = std::weak_ptr(call)] {
      if (const auto self = weak.lock()) self->End(MessageTimedOut());
    });
    call->StartRead(&call->bytes_);
    return call.get();
  }

  explicit WatchCall(HealthService* service) : service_(service), timer_(&service->deadlines_) {}

  void OnReadDone(bool ok) override {
    timer_.Stop();
    Guarded(
        kWatch,
        [&] {
          if (!ok) return End(RequestMissing());
          Request request;
          const absl::Status status = ParseRequest(&bytes_, kMaxHealthRequestBytes, &request);
          if (!status.ok()) return End(status);
          {
            absl::MutexLock lock(&mu_);
            name_ = request.value();
          }
          service_->Enter(shared_from_this());
          Look();
        },
        [this](const absl::Status& status) { End(status); });
  }
  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      if (ended_) return Finish(*ended_);
    }
    if (ok) Look();
  }
  void OnCancel() override { End(absl::CancelledError("the client cancelled the call")); }
  void OnDone() override {
    service_->Leave(shared_from_this());
    auto self = std::move(self_);
  }

  // Tells the client what the service is now, if that is another status than it was told.
  void Look() {
    absl::MutexLock lock(&mu_);
    if (ended_ || writing_) return;
    const HealthService::Status now = service_->Get(name_);
    if (told_ == now) return;
    told_ = now;
    writing_ = true;
    response_ = Encode(now);
    StartWrite(&response_);
  }

  // Once the outstanding write is done.
  void End(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    if (ended_) return;
    ended_ = ToGrpc(status);
    if (!writing_) Finish(*ended_);
  }

 private:
  HealthService* const service_;
  std::shared_ptr<WatchCall> self_;
  grpc::ByteBuffer bytes_;
  MessageTimer timer_;
  absl::Mutex mu_;
  Response response_;  // of the outstanding write
  std::string name_ ABSL_GUARDED_BY(mu_);
  std::optional<HealthService::Status> told_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<grpc::Status> ended_ ABSL_GUARDED_BY(mu_);
};

HealthService::HealthService(Services* services) : LateService("grpc.health.v1.Health", services) {
  Add(kCheck, grpc::internal::RpcMethod::BIDI_STREAMING,
      new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, Response>(
          [this](grpc::CallbackServerContext*) { return CheckCall::Start(this); }));
  Add(kWatch, grpc::internal::RpcMethod::BIDI_STREAMING,
      new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, Response>(
          [this](grpc::CallbackServerContext*) { return WatchCall::Start(this); }));
}

HealthService::~HealthService() = default;

void HealthService::Set(const std::string& service, bool serving) {
  {
    absl::MutexLock lock(&mu_);
    serving_[service] = serving;
  }
  for (const auto& watch : Watchers()) watch->Look();
}

HealthService::Status HealthService::Get(const std::string& service) const {
  absl::MutexLock lock(&mu_);
  const auto found = serving_.find(service);
  if (found == serving_.end()) return Status::kServiceUnknown;
  return found->second ? Status::kServing : Status::kNotServing;
}

void HealthService::Shutdown() {
  {
    absl::MutexLock lock(&mu_);
    shut_down_ = true;
  }
  for (const auto& watch : Watchers()) watch->End(absl::UnavailableError("the server is ending"));
}

void HealthService::Enter(const std::shared_ptr<WatchCall>& watch) {
  {
    absl::MutexLock lock(&mu_);
    if (!shut_down_) {
      watchers_.insert(watch);
      return;
    }
  }
  watch->End(absl::UnavailableError("the server is ending"));
}

void HealthService::Leave(const std::shared_ptr<WatchCall>& watch) {
  absl::MutexLock lock(&mu_);
  watchers_.erase(watch);
}

std::set<std::shared_ptr<HealthService::WatchCall>> HealthService::Watchers() const {
  absl::MutexLock lock(&mu_);
  return watchers_;
}

}  // namespace dorad::rpc
