#include "server/rpc/status.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/platform/error.h"
#include "server/platform/files/utf8.h"

namespace dorad::rpc {
namespace {

constexpr char kDomain[] = "dorad";
constexpr size_t kMaxMetadataBytes = 256;
constexpr size_t kMaxDescriptionBytes = 512;

google::rpc::ErrorInfo MakeErrorInfo(const absl::Status& status,
                                     const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo info;
  const std::string reason = ReasonOf(status);
  info.set_reason(reason.empty() ? CodeName(status.code()) : reason);
  info.set_domain(kDomain);
  for (const auto& facts : {MetadataOf(status), metadata}) {
    for (const auto& [key, value] : facts) {
      (*info.mutable_metadata())[key] = Presentable(value, kMaxMetadataBytes);
    }
  }
  return info;
}

google::rpc::RetryInfo MakeRetryInfo(absl::Duration retry_after) {
  google::rpc::RetryInfo info;
  const int64_t seconds = absl::IDivDuration(retry_after, absl::Seconds(1), &retry_after);
  info.mutable_retry_delay()->set_seconds(seconds);
  info.mutable_retry_delay()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(retry_after)));
  return info;
}

// As many violations as fit into `budget` bytes; the last one counts those left out here and the
// `omitted` ones.
google::rpc::BadRequest MakeBadRequest(const std::vector<Violation>& violations, size_t omitted,
                                       size_t budget) {
  constexpr size_t kRoomForCount = 96;
  google::rpc::BadRequest bad;
  size_t shown = 0;
  for (; shown < violations.size(); ++shown) {
    google::rpc::BadRequest::FieldViolation item;
    item.set_field(Presentable(violations[shown].field, kMaxMetadataBytes));
    item.set_reason(violations[shown].reason);
    item.set_description(Presentable(violations[shown].description, kMaxDescriptionBytes));
    if (shown > 0 && bad.ByteSizeLong() + item.ByteSizeLong() + kRoomForCount > budget) break;
    *bad.add_field_violations() = std::move(item);
  }
  if (const size_t more = violations.size() - shown + omitted; more > 0) {
    auto* rest = bad.add_field_violations();
    rest->set_reason("MORE_VIOLATIONS");
    rest->set_description(absl::StrCat("and ", more, " more"));
  }
  return bad;
}

}  // namespace

std::string Presentable(const std::string& text, size_t max_bytes) {
  constexpr std::string_view kCut = "...";
  std::string out;
  std::string_view rest(text);
  size_t cut = 0;  // the end of `out` if it must be cut
  while (!rest.empty()) {
    const size_t length = Utf8SequenceLength(rest);
    const bool control = length == 1 && (rest[0] < ' ' || rest[0] == '\x7f');
    if (length == 0 || control) {
      out += '?';
    } else {
      out += rest.substr(0, length);
    }
    rest.remove_prefix(std::max<size_t>(length, 1));
    if (out.size() + kCut.size() <= max_bytes) cut = out.size();
    if (out.size() > max_bytes) {
      out.resize(cut);
      out += kCut;
      return out;
    }
  }
  return out;
}

grpc::Status ToGrpc(const absl::Status& status,
                    const std::map<std::string, std::string>& metadata) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status wire;
  wire.set_code(static_cast<int>(status.code()));
  wire.set_message(Presentable(std::string(status.message()), kMaxMessageBytes));
  wire.add_details()->PackFrom(MakeErrorInfo(status, metadata));
  if (const auto retry_after = RetryAfterOf(status)) {
    wire.add_details()->PackFrom(MakeRetryInfo(*retry_after));
  }
  const std::vector<Violation> violations = ViolationsOf(status);
  if (!violations.empty()) {
    constexpr size_t kAnyOverhead = 64;  // type URL and framing
    const size_t used = wire.ByteSizeLong() + kAnyOverhead;
    const size_t budget = used < kMaxDetailsBytes ? kMaxDetailsBytes - used : 0;
    wire.add_details()->PackFrom(MakeBadRequest(violations, OmittedViolationsOf(status), budget));
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), wire.message(),
                      wire.SerializeAsString());
}

std::optional<std::string> RetryPushback(const absl::Status& status) {
  if (const auto retry_after = RetryAfterOf(status)) {
    return absl::StrCat(std::max<int64_t>(absl::ToInt64Milliseconds(*retry_after), 1));
  }
  if (status.code() == absl::StatusCode::kResourceExhausted) return "-1";
  return std::nullopt;
}

const char* CodeName(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return "OK";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    case absl::StatusCode::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case absl::StatusCode::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case absl::StatusCode::kNotFound:
      return "NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "ALREADY_EXISTS";
    case absl::StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case absl::StatusCode::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case absl::StatusCode::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case absl::StatusCode::kAborted:
      return "ABORTED";
    case absl::StatusCode::kOutOfRange:
      return "OUT_OF_RANGE";
    case absl::StatusCode::kUnimplemented:
      return "UNIMPLEMENTED";
    case absl::StatusCode::kInternal:
      return "INTERNAL";
    case absl::StatusCode::kUnavailable:
      return "UNAVAILABLE";
    case absl::StatusCode::kDataLoss:
      return "DATA_LOSS";
    case absl::StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
    default:
      return "UNKNOWN";
  }
}

}  // namespace dorad::rpc
