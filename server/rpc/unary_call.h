// The reactor of all calls with one answer, which may be given later from any thread.
//
// Kept alive by gRPC until it is done and by whoever holds a reference. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/failpoint.h"
#include "server/rpc/call.h"
#include "server/rpc/message_deadlines.h"
#include "server/rpc/request_reading.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

template <typename Response>
class UnaryCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, Response>,
                        public std::enable_shared_from_this<UnaryCall<Response>> {
 public:
  // Takes the request's bytes; ends the call or arranges for that.
  using Handler = std::function<void(const std::shared_ptr<UnaryCall>&, grpc::ByteBuffer*)>;

  // Starts a call and, if its caller may, reads its request for the handler, which is borrowed.
  static UnaryCall* Start(const char* method, grpc::CallbackServerContext* context,
                          const Services* services, const Handler* handler) {
    auto call = std::make_shared<UnaryCall>(method, context, services, handler);
    call->self_ = call;
    Guarded(
        method, [&] { call->Read(); }, [&](const absl::Status& status) { call->End(status); });
    return call.get();
  }

  UnaryCall(const char* method, grpc::CallbackServerContext* context, const Services* services,
            const Handler* handler)
      : record_(method, context, services),
        handler_(handler),
        timer_(services->message_deadlines.get()) {}

  CallRecord& record() { return record_; }
  const security::Principal& caller() const { return *record_.caller(); }

  // Counts the call there until its answer has been sent. Called by the handler.
  void CountIn(std::atomic<int>* open) { open_.emplace(open); }

  // Runs once when the client goes before the end. Set by the handler.
  void set_on_cancel(std::function<void()> on_cancel) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    on_cancel_ = std::move(on_cancel);
  }

  // There is no answer, or an empty one.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    EndLocked(status);
  }

  // Calls fill(Response*) -> absl::Status, if the call has not ended, and ends it with the result.
  template <typename Fill>
  void Complete(Fill&& fill) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (ended_) return;
    Guarded(
        record_.method(),
        [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
          Failpoint("rpc_answer");
          EndLocked(fill(&response_));
        },
        [&](const absl::Status& status) ABSL_NO_THREAD_SAFETY_ANALYSIS { EndLocked(status); });
  }

  void OnReadDone(bool ok) override {
    Guarded(
        record_.method(), [&] { Handle(ok); }, [this](const absl::Status& status) { End(status); });
    bool cancelled = false;
    {
      absl::MutexLock lock(&mu_);
      stage_ = Stage::kHandled;
      cancelled = cancelled_;
    }
    if (cancelled) Cancel();
  }
  void OnCancel() override {
    {
      absl::MutexLock lock(&mu_);
      cancelled_ = true;
      // What the handler arranges for is not there to be undone yet.
      if (stage_ == Stage::kHandling) return;
    }
    Cancel();
  }
  // gRPC calls nothing after it, and it last.
  void OnDone() override {
    std::function<void()> on_cancel;  // may hold what holds this call
    {
      absl::MutexLock lock(&mu_);
      on_cancel = std::exchange(on_cancel_, nullptr);
    }
    open_.reset();  // whoever holds this call may outlive the services
    auto self = std::move(self_);
  }

 private:
  enum class Stage { kReading, kHandling, kHandled };

  void Read() {
    if (!record_.admission().ok()) return End(record_.admission());
    timer_.Start([weak = this->weak_from_this()] {
      if (const auto call = weak.lock()) call->TimeOut();
    });
    this->StartRead(&request_);
  }

  void TimeOut() ABSL_LOCKS_EXCLUDED(mu_) {
    Guarded(
        record_.method(),
        [this] {
          absl::MutexLock lock(&mu_);
          if (stage_ == Stage::kReading) EndLocked(MessageTimedOut());
        },
        [this](const absl::Status& status) { End(status); });
  }

  void Handle(bool ok) ABSL_LOCKS_EXCLUDED(mu_) {
    timer_.Stop();
    {
      absl::MutexLock lock(&mu_);
      if (ended_) return;
      if (!ok) return EndLocked(record_.NoMessageStatus(RequestMissing()));
      stage_ = Stage::kHandling;
    }
    Failpoint("rpc_handler");
    (*handler_)(this->shared_from_this(), &request_);
  }

  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    Guarded(
        record_.method(),
        [this] {
          std::function<void()> on_cancel;
          {
            absl::MutexLock lock(&mu_);
            on_cancel = std::exchange(on_cancel_, nullptr);
          }
          if (on_cancel) on_cancel();
          Failpoint("rpc_cancel");
          End(record_.CancelStatus());
        },
        [this](const absl::Status& status) { End(status); });
  }

  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (ended_) return;
    ended_ = true;
    const grpc::Status end = record_.End(status);
    if (end.ok()) {
      this->StartWriteAndFinish(&response_, grpc::WriteOptions(), end);
    } else {
      this->Finish(end);
    }
  }

  std::shared_ptr<UnaryCall> self_;
  CallRecord record_;
  const Handler* const handler_;
  grpc::ByteBuffer request_;  // of the outstanding read
  MessageTimer timer_;
  std::optional<OpenCount> open_;
  absl::Mutex mu_;
  Response response_ ABSL_GUARDED_BY(mu_);
  std::function<void()> on_cancel_ ABSL_GUARDED_BY(mu_);
  Stage stage_ ABSL_GUARDED_BY(mu_) = Stage::kReading;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::rpc
