// One call's book-keeping: its caller, its metrics, its line in the log, its final status.
//
// Exceptions must not reach gRPC: one that leaves a callback hangs the call. Call runs the body of
// every callback through Guarded.
#pragma once

#include <grpcpp/server_context.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/adapter/registry/version.h"
#include "server/platform/instant.h"
#include "server/platform/metrics/metrics.h"
#include "server/platform/metrics/request_log.h"
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
// log. A probe's caller is not asked, and it is neither counted nor logged. Not thread-safe.
class CallRecord {
 public:
  CallRecord(const char* method, grpc::CallbackServerContext* context, const Services* services,
             bool is_probe = false);

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
  // Why a call without a (further) message ends: CancelStatus, or what is given.
  absl::Status NoMessageStatus(const absl::Status& unless_cancelled) const;
  // What to finish the call with; adds its id and the retry hint to the trailers. Once. Throws
  // nothing: a call that is not finished would hang.
  grpc::Status End(const absl::Status& ended);

 private:
  grpc::Status TryEnd(const absl::Status& ended);

  const char* const method_;
  grpc::CallbackServerContext* const context_;
  const Services* const services_;
  Metrics* const metrics_;
  const bool is_probe_;
  const Instant start_;
  absl::Status admission_;
  Caller caller_;                                      // nullptr: unknown
  std::shared_ptr<const security::TokenTable> table_;  // that said so
  std::shared_ptr<security::Quotas::Hold> stream_;
  std::string request_id_;
  std::shared_ptr<RequestLog> log_;
};

}  // namespace dorad::rpc
