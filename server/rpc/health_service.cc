#include "server/rpc/health_service.h"

#include <google/protobuf/wrappers.pb.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/status.h"

namespace dorad::rpc {
namespace {

// On the wire HealthCheckRequest is a text with number 1 and HealthCheckResponse a number with
// number 1, as these are.
using Request = google::protobuf::BytesValue;
using Response = google::protobuf::UInt32Value;
using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, Response>;

constexpr char kMethod[] = "Health";  // in the log

}  // namespace

// What both calls share: the request, which is the name of a service, read in time. Kept alive by
// gRPC until OnDone, which it calls last. Lock order: mu_, then the service's. Thread-safe.
class HealthService::Call : public Reactor, public std::enable_shared_from_this<Call> {
 public:
  template <typename Kind>
  static Reactor* Start(HealthService* service) {
    auto call = std::make_shared<Kind>(service);
    call->self_ = call;
    call->timer_.Start([weak = std::weak_ptr<Call>(call)] {
      if (const auto self = weak.lock()) self->TimeOut();
    });
    call->StartRead(&call->bytes_);
    return call.get();
  }

  void TimeOut() {
    Guarded(
        kMethod,
        [this] {
          End(MakeError(
              absl::StatusCode::kUnavailable, "MESSAGE_TIMEOUT",
              absl::StrCat("no request came within ", absl::FormatDuration(kHealthRequestTime))));
        },
        [this](const absl::Status& status) { End(status); });
  }
  void OnReadDone(bool ok) final {
    timer_.Stop();
    Guarded(
        kMethod,
        [&] {
          if (!ok) return End(RequestMissing());
          Request request;
          const absl::Status status = ParseRequest(&bytes_, kMaxHealthRequestBytes, &request);
          if (!status.ok()) return End(status);
          Answer(request.value());
        },
        [this](const absl::Status& status) { End(status); });
  }
  void OnWriteDone(bool ok) final {
    Guarded(
        kMethod,
        [&] {
          {
            absl::MutexLock lock(&mu_);
            writing_ = false;
            if (end_) return Finish(*end_);
          }
          if (ok) Look();
        },
        [this](const absl::Status& status) { End(status); });
  }
  void OnCancel() final {
    Guarded(
        kMethod, [this] { End(absl::CancelledError("the client cancelled the call")); },
        [this](const absl::Status& status) { End(status); });
  }
  void OnDone() override { auto self = std::move(self_); }

  // Something may have changed.
  virtual void Look() {}

  // Once the outstanding write is done.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    EndLocked(ToGrpc(status));
  }

 protected:
  explicit Call(HealthService* service) : service_(service), timer_(&service->deadlines_) {}

  virtual void Answer(const std::string& name) = 0;

  // Whether nothing stands against a write.
  bool IsFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !writing_ && !end_; }
  void Write(Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    writing_ = true;
    response_.set_value(static_cast<uint32_t>(status));
    StartWrite(&response_);
  }
  void EndLocked(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (end_) return;
    end_ = std::move(status);
    if (!writing_) Finish(*end_);
  }

  HealthService* const service_;
  absl::Mutex mu_;

 private:
  std::shared_ptr<Call> self_;
  grpc::ByteBuffer bytes_;
  MessageTimer timer_;
  Response response_ ABSL_GUARDED_BY(mu_);  // of the outstanding write
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mu_);
};

class HealthService::CheckCall final : public Call {
 public:
  explicit CheckCall(HealthService* service) : Call(service) {}

 private:
  void Answer(const std::string& name) override {
    const Status found = service_->Get(name);
    if (found == Status::kServiceUnknown) {
      return End(absl::NotFoundError("this listener has no such service"));
    }
    absl::MutexLock lock(&mu_);
    if (!IsFree()) return;
    Write(found);
    EndLocked(grpc::Status::OK);
  }
};

// The status now, and whenever it is another one; what a slow reader has not taken is passed over.
class HealthService::WatchCall final : public Call {
 public:
  explicit WatchCall(HealthService* service) : Call(service) {}

  void Look() override {
    absl::MutexLock lock(&mu_);
    if (!IsFree()) return;
    const Status now = service_->Get(name_);
    if (told_ == now) return;
    told_ = now;
    Write(now);
  }
  void OnDone() override {
    service_->Leave(shared_from_this());
    Call::OnDone();
  }

 private:
  void Answer(const std::string& name) override {
    {
      absl::MutexLock lock(&mu_);
      name_ = name;
    }
    service_->Enter(shared_from_this());
    Look();
  }

  std::string name_ ABSL_GUARDED_BY(mu_);
  std::optional<Status> told_ ABSL_GUARDED_BY(mu_);
};

HealthService::HealthService(Services* services) : LateService("grpc.health.v1.Health", services) {
  using Handler = grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, Response>;
  Add("Check", grpc::internal::RpcMethod::BIDI_STREAMING,
      new Handler([this](grpc::CallbackServerContext*) { return Call::Start<CheckCall>(this); }));
  Add("Watch", grpc::internal::RpcMethod::BIDI_STREAMING,
      new Handler([this](grpc::CallbackServerContext*) { return Call::Start<WatchCall>(this); }));
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

void HealthService::Enter(const std::shared_ptr<Call>& watch) {
  {
    absl::MutexLock lock(&mu_);
    if (!shut_down_) {
      watchers_.insert(watch);
      return;
    }
  }
  watch->End(absl::UnavailableError("the server is ending"));
}

void HealthService::Leave(const std::shared_ptr<Call>& watch) {
  absl::MutexLock lock(&mu_);
  watchers_.erase(watch);
}

std::set<std::shared_ptr<HealthService::Call>> HealthService::Watchers() const {
  absl::MutexLock lock(&mu_);
  return watchers_;
}

}  // namespace dorad::rpc
