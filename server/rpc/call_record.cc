#include "server/rpc/call_record.h"

#include <chrono>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/platform/error.h"
#include "server/platform/log.h"
#include "server/rpc/call_context.h"
#include "server/rpc/request_defaults.h"
#include "server/rpc/status.h"
#include "server/security/authority.h"
#include "server/security/method_rules.h"

namespace dorad::rpc {
namespace {

constexpr absl::Duration kRetryRightsChanged = absl::Milliseconds(100);

// The value of a metadata key that occurs once; else "". Valid as long as the context.
std::string_view OnlyValue(const grpc::CallbackServerContext& context, const char* key) {
  const auto [begin, end] = context.client_metadata().equal_range(key);
  if (begin == end || std::next(begin) != end) return {};
  return {begin->second.data(), begin->second.size()};
}

// A refusal because of the caller's rights or the tenant's quota.
bool IsDenial(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status) ||
         absl::StartsWith(ReasonOf(status), "QUOTA_");
}

}  // namespace

absl::Status ExceptionStatus(const char* method, const char* what) {
  LogError("exception in a call", {{"method", std::string(method)}, {"error", std::string(what)}});
  // The text of an exception may show internals: it stays in the log.
  return MakeError(absl::StatusCode::kInternal, "INTERNAL_ERROR",
                   "the server failed to handle the call; see its log");
}

CallRecord::CallRecord(const char* method, grpc::CallbackServerContext* context,
                       const Services* services, bool is_probe)
    : method_(method),
      context_(context),
      services_(services),
      metrics_(services->metrics),
      is_probe_(is_probe),
      start_(SteadyNow()),
      log_(is_probe ? nullptr : std::make_shared<RequestLog>()) {
  if (is_probe_) return;
  metrics_->RpcStarted(method_);
  const std::string_view id = OnlyValue(*context, kRequestIdKey);
  set_request_id(IsRequestId(id) ? std::string(id) : ChooseRequestId());
  log_->Set("method", std::string(method));
  log_->Set("peer", std::string(context->peer()));
  std::string trace_id = TraceIdOf(OnlyValue(*context, kTraceparentKey));
  if (!trace_id.empty()) log_->Set("trace_id", std::move(trace_id));
  // Read before the look-up: a table that changes meanwhile is then checked again, not missed.
  if (services->authority != nullptr) table_ = services->authority->table();
  absl::StatusOr<Caller> caller = Identify(*services, *context, method);
  admission_ = caller.status();
  if (!caller.ok()) return;
  caller_ = *std::move(caller);
  if (services->quotas == nullptr || !security::RuleOf(method).is_stream) return;
  absl::StatusOr<security::Quotas::Hold> stream = services->quotas->OpenStream(caller_->tenant);
  admission_ = stream.status();
  if (stream.ok()) stream_ = std::make_shared<security::Quotas::Hold>(*std::move(stream));
}

absl::Status CallRecord::CheckRights() {
  if (services_->authority == nullptr) return absl::OkStatus();
  auto table = services_->authority->table();
  if (table == table_) return absl::OkStatus();
  DORAD_ASSIGN_OR_RETURN(const Caller caller, Identify(*services_, *context_, method_));
  if (!(*caller == *caller_)) {
    return WithRetryAfter(MakeError(absl::StatusCode::kUnavailable, "RIGHTS_CHANGED",
                                    "the tokens file has changed the caller's rights"),
                          kRetryRightsChanged);
  }
  table_ = std::move(table);
  return absl::OkStatus();
}

void CallRecord::set_request_id(std::string id) {
  request_id_ = std::move(id);
  log_->Set("request_id", request_id_);
}

void CallRecord::NameAdapter(const adapter::AdapterRef& ref) {
  log_->Set("adapter", ref.name);
  if (ref.version > 0) log_->Set("adapter_version", ref.version);
}

absl::Time CallRecord::Deadline(absl::Duration fallback) const {
  const std::chrono::system_clock::time_point deadline = context_->deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) return absl::FromChrono(deadline);
  if (fallback > absl::ZeroDuration()) return absl::Now() + fallback;
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

absl::Status CallRecord::NoMessageStatus(const absl::Status& unless_cancelled) const {
  return context_->IsCancelled() ? CancelStatus() : unless_cancelled;
}

grpc::Status CallRecord::End(const absl::Status& ended) {
  grpc::Status status;
  Guarded(
      method_, [&] { status = TryEnd(ended); },
      [&](const absl::Status& failed) { status = ToGrpc(failed); });
  return status;
}

grpc::Status CallRecord::TryEnd(const absl::Status& ended) {
  if (is_probe_) return ToGrpc(ended);
  // Released first: a client that sees the end may start another call.
  stream_.reset();
  const absl::Status status = caller_ ? WithoutForeignNames(*caller_, ended) : ended;
  if (const std::optional<std::string> pushback = RetryPushback(status)) {
    context_->AddTrailingMetadata("grpc-retry-pushback-ms", *pushback);
  }
  if (IsDenial(status)) metrics_->CallDenied(ReasonOf(status));
  context_->AddTrailingMetadata(kRequestIdKey, request_id_);
  const absl::Duration time = Since(start_);
  metrics_->RpcHandled(method_, CodeName(status.code()), time);
  log_->Set("code", std::string(CodeName(status.code())));
  if (!status.ok()) log_->Set("reason", ReasonOf(status));
  log_->Set("total_seconds", absl::ToDoubleSeconds(time));
  log_.reset();
  return ToGrpc(status, {{"request_id", request_id_}});
}

}  // namespace dorad::rpc
