#include "server/rpc/call.h"

#include <chrono>
#include <optional>

#include "server/base/error.h"
#include "server/base/log.h"
#include "server/rpc/status.h"

namespace dorad::rpc {

absl::Status ExceptionStatus(const char* method, const char* what) {
  LogError("exception in a call", {{"method", std::string(method)}, {"error", std::string(what)}});
  // The text of an exception may show internals: it stays in the log.
  return MakeError(absl::StatusCode::kInternal, "INTERNAL_ERROR",
                   "the server failed to handle the call; its log says why");
}

CallRecord::CallRecord(const char* method, grpc::CallbackServerContext* context, Metrics* metrics)
    : method_(method), context_(context), metrics_(metrics), start_(absl::Now()) {
  metrics_->RpcStarted(method_);
}

absl::Time CallRecord::Deadline(absl::Duration fallback) const {
  const std::chrono::system_clock::time_point deadline = context_->deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) return absl::FromChrono(deadline);
  if (fallback > absl::ZeroDuration()) return start_ + fallback;
  return absl::InfiniteFuture();
}

absl::Status CallRecord::CancelStatus() const {
  if (absl::Now() >= Deadline(absl::ZeroDuration())) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                     "the deadline passed");
  }
  return MakeError(absl::StatusCode::kCancelled, "CLIENT_CANCELLED",
                   "the client cancelled the call");
}

grpc::Status CallRecord::End(const absl::Status& status) {
  if (const std::optional<std::string> pushback = RetryPushback(status)) {
    context_->AddTrailingMetadata("grpc-retry-pushback-ms", *pushback);
  }
  metrics_->RpcHandled(method_, CodeName(status.code()), absl::Now() - start_);
  std::map<std::string, std::string> metadata;
  if (!request_id_.empty()) metadata["request_id"] = request_id_;
  return ToGrpc(status, metadata);
}

}  // namespace dorad::rpc
