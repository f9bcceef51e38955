// One call's caller, metrics, log line and final status.
//
// An exception that leaves a gRPC callback hangs the call. Call runs the body of every callback
// through Guarded.
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

// INTERNAL (INTERNAL_ERROR); the exception's text goes to the log.
absl::Status ExceptionStatus(const char* method, const char* what);

// Runs body(); an exception becomes a status for on_error(absl::Status).
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

// Identifies the caller of a call, counts the call, makes its final status and logs it. Probes are
// neither identified nor counted nor logged. Not thread-safe.
class CallRecord {
 public:
  CallRecord(const char* method, grpc::CallbackServerContext* context, const Services* services,
             bool is_probe = false);

  const char* method() const { return method_; }
  // Refusal of the call: Identify's statuses, and those of the tenant's quota of streams.
  const absl::Status& admission() const { return admission_; }
  // REQUIRES: admission().ok().
  const Caller& caller() const { return caller_; }
  // Checks the rights again: the tokens file may have changed. Identify's statuses, and UNAVAILABLE
  // (RIGHTS_CHANGED): the caller has other rights now and may retry.
  absl::Status CheckRights();
  // For the x-request-id trailer, the log and the ErrorInfo of a failure: the caller's
  // x-request-id, or a new id, until the message's own is set.
  const std::string& request_id() const { return request_id_; }
  void set_request_id(std::string id);
  // The adapter of the call; version 0: none in the request.
  void NameAdapter(const adapter::AdapterRef& ref);
  // The call's share of its tenant's streams. Work that outlives the call holds it, too, and
  // releases it before an answer. nullptr: none, or after End.
  const std::shared_ptr<security::Quotas::Hold>& stream() const { return stream_; }
  // The call's log line, for other components to add to while they hold it. nullptr after End.
  const std::shared_ptr<RequestLog>& log() const { return log_; }
  // The caller's deadline, or now + fallback if there is none (fallback zero: never).
  absl::Time Deadline(absl::Duration fallback) const;
  // The status of a call that the client has given up.
  absl::Status CancelStatus() const;
  // The status without a (further) message: CancelStatus, or the given one.
  absl::Status NoMessageStatus(const absl::Status& unless_cancelled) const;
  // The final status; adds the call's id and the retry hint to the trailers. Once. Never throws: an
  // unfinished call would hang.
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
  std::shared_ptr<const security::TokenTable> table_;  // source of caller_
  std::shared_ptr<security::Quotas::Hold> stream_;
  std::string request_id_;
  std::shared_ptr<RequestLog> log_;
};

}  // namespace dorad::rpc
