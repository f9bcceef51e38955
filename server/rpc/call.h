// One call's book-keeping, and the reactor of all unary calls.
//
// Exceptions must not reach gRPC: one that leaves a callback hangs the call. Every callback of this
// room runs its body through Guarded.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/adapter/version.h"
#include "server/base/failpoint.h"
#include "server/base/instant.h"
#include "server/base/metrics.h"
#include "server/base/request_log.h"
#include "server/rpc/access.h"
#include "server/rpc/services.h"

namespace dorad::rpc {

// INTERNAL (INTERNAL_ERROR), logged with what it was.
absl::Status ExceptionStatus(const char* method, const char* what);

// Runs body(); what it throws becomes a status for on_error(absl::Status).
template <typename Body, typename OnError>
void Guarded(const char* method, Body&& body, OnError&& on_error) {
  try {
    body();
  } catch (const std::exception& e) {
    on_error(ExceptionStatus(method, e.what()));
  } catch (...) {
    on_error(ExceptionStatus(method, "unknown exception"));
  }
}

// Identifies the caller of a call, counts it, makes its final status and says how it went in the
// log. Not thread-safe.
class CallRecord {
 public:
  CallRecord(const char* method, grpc::CallbackServerContext* context, const Services* services);

  const char* method() const { return method_; }
  // Why the call must not run: Identify's statuses, and those of the tenant's quota of streams.
  const absl::Status& admission() const { return admission_; }
  // REQUIRES: admission().ok().
  const Caller& caller() const { return caller_; }
  // Whether the call may go on as it began: the tokens file may have changed. Identify's statuses,
  // and UNAVAILABLE (RIGHTS_CHANGED): the caller may now do other things, and may try again.
  absl::Status CheckRights();
  // Named in the x-request-id trailer, in the log and in the ErrorInfo of a failure: the caller's
  // x-request-id, or one of the server's choice, until the message's own is set.
  const std::string& request_id() const { return request_id_; }
  void set_request_id(std::string id);
  // The adapter that the call is about; version 0: as the name says.
  void NameAdapter(const adapter::AdapterRef& ref);
  // The call's place among its tenant's streams. Who works on when the call has ended holds it,
  // too, and releases it before an answer. nullptr: takes none, or after End.
  const std::shared_ptr<security::Quotas::Hold>& stream() const { return stream_; }
  // The call's line in the log, for others to add to until they let go of it. nullptr after End.
  const std::shared_ptr<RequestLog>& log() const { return log_; }
  // The caller's deadline, or now + fallback if there is none (fallback zero: never).
  absl::Time Deadline(absl::Duration fallback) const;
  // Why a call that the client no longer waits for ends.
  absl::Status CancelStatus() const;
  // What to finish the call with; adds its id and the retry hint to the trailers. Once.
  grpc::Status End(const absl::Status& ended);

 private:
  const char* const method_;
  grpc::CallbackServerContext* const context_;
  const Services* const services_;
  Metrics* const metrics_;
  const Instant start_;
  absl::Status admission_;
  Caller caller_;                                      // nullptr: unknown
  std::shared_ptr<const security::TokenTable> table_;  // that said so
  std::shared_ptr<security::Quotas::Hold> stream_;
  std::string request_id_;
  std::shared_ptr<RequestLog> log_;
};

// A unary call that may be answered later from any thread. Kept alive by gRPC until it is done and
// by whoever holds a reference. Thread-safe.
template <typename Response>
class UnaryCall final : public grpc::ServerUnaryReactor,
                        public std::enable_shared_from_this<UnaryCall<Response>> {
 public:
  // Starts a call and, if its caller may, runs body(call), which ends it or arranges for that.
  template <typename Body>
  static grpc::ServerUnaryReactor* Run(const char* method, grpc::CallbackServerContext* context,
                                       const Services* services, Response* response, Body&& body) {
    auto call = std::make_shared<UnaryCall>(method, context, services, response);
    call->self_ = call;
    if (!call->record_.admission().ok()) {
      call->End(call->record_.admission());
      return call.get();
    }
    Guarded(
        method,
        [&] {
          Failpoint("rpc_handler");
          body(call);
        },
        [&](const absl::Status& status) { call->End(status); });
    return call.get();
  }

  UnaryCall(const char* method, grpc::CallbackServerContext* context, const Services* services,
            Response* response)
      : record_(method, context, services), response_(response) {}

  CallRecord& record() { return record_; }
  const security::Principal& caller() const { return *record_.caller(); }

  // Counts the call there until its answer has been sent. Called by the body.
  void CountIn(std::atomic<int>* open) { open_.emplace(open); }

  // Runs once when the client has gone before the end. Set by the body.
  void set_on_cancel(std::function<void()> on_cancel) { on_cancel_ = std::move(on_cancel); }

  // The answer is in the response (if OK), or there is none.
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
          EndLocked(fill(response_));
        },
        [&](const absl::Status& status) ABSL_NO_THREAD_SAFETY_ANALYSIS { EndLocked(status); });
  }

  void OnCancel() override {
    Guarded(
        record_.method(),
        [this] {
          if (on_cancel_) on_cancel_();
          Failpoint("rpc_cancel");
          End(record_.CancelStatus());
        },
        [this](const absl::Status& status) { End(status); });
  }
  // gRPC calls nothing after it, and it last.
  void OnDone() override {
    on_cancel_ = nullptr;  // may hold what holds this call
    open_.reset();         // whoever holds this call may outlive the services
    auto self = std::move(self_);
  }

 private:
  void EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (ended_) return;
    ended_ = true;
    this->Finish(record_.End(status));
  }

  std::shared_ptr<UnaryCall> self_;
  CallRecord record_;
  Response* const response_;
  std::function<void()> on_cancel_;
  std::optional<OpenCount> open_;
  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dorad::rpc
