#include "server/platform/error.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/platform/check.h"

namespace dorad {
namespace {

constexpr char kReasonUrl[] = "dorad/reason";
constexpr char kViolationsUrl[] = "dorad/violations";
constexpr char kOmittedUrl[] = "dorad/omitted_violations";
constexpr char kMetadataUrl[] = "dorad/metadata/";  // and the key
constexpr char kRetryUrl[] = "dorad/retry_after_ns";

// Violations are encoded as fields separated by 0x1F and records by 0x1E; both are removed from the
// texts, so the encoding needs no escapes.
constexpr char kFieldSep = '\x1f';
constexpr char kRecordSep = '\x1e';

std::string Clean(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c == kFieldSep || c == kRecordSep) c = ' ';
  }
  return out;
}

std::string Payload(const absl::Status& status, const char* url) {
  const absl::optional<absl::Cord> cord = status.GetPayload(url);
  return cord ? std::string(*cord) : std::string();
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, std::string_view reason, std::string_view message) {
  DORAD_CHECK(code != absl::StatusCode::kOk);
  absl::Status status(code, absl::string_view(message.data(), message.size()));
  status.SetPayload(kReasonUrl, absl::Cord(absl::string_view(reason.data(), reason.size())));
  return status;
}

absl::Status MakeInvalid(std::string_view subject, std::vector<Violation> violations,
                         size_t omitted) {
  DORAD_CHECK(!violations.empty());
  constexpr size_t kShown = 8;
  constexpr size_t kMaxListed = 64;
  std::string message(subject);
  absl::StrAppend(&message, ": ");
  for (size_t i = 0; i < violations.size() && i < kShown; ++i) {
    if (i > 0) absl::StrAppend(&message, "; ");
    absl::StrAppend(&message, violations[i].field, ": ", violations[i].description);
  }
  const size_t shown = std::min(violations.size(), kShown);
  const size_t total = violations.size() + omitted;
  if (total > shown) absl::StrAppend(&message, "; and ", total - shown, " more");
  const size_t listed = std::min(violations.size(), kMaxListed);
  absl::Status status =
      MakeError(absl::StatusCode::kInvalidArgument, violations.front().reason, message);
  std::string encoded;
  for (size_t i = 0; i < listed; ++i) {
    const Violation& v = violations[i];
    absl::StrAppend(&encoded, Clean(v.field), std::string(1, kFieldSep), Clean(v.reason),
                    std::string(1, kFieldSep), Clean(v.description), std::string(1, kRecordSep));
  }
  status.SetPayload(kViolationsUrl, absl::Cord(encoded));
  if (total > listed) status.SetPayload(kOmittedUrl, absl::Cord(absl::StrCat(total - listed)));
  return status;
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after) {
  status.SetPayload(kRetryUrl, absl::Cord(absl::StrCat(absl::ToInt64Nanoseconds(retry_after))));
  return status;
}

absl::Status WithMetadata(absl::Status status, std::string_view key, std::string_view value) {
  status.SetPayload(absl::StrCat(kMetadataUrl, std::string(key)),
                    absl::Cord(absl::string_view(value.data(), value.size())));
  return status;
}

std::string ReasonOf(const absl::Status& status) { return Payload(status, kReasonUrl); }

std::vector<Violation> ViolationsOf(const absl::Status& status) {
  std::vector<Violation> out;
  const std::string encoded = Payload(status, kViolationsUrl);
  for (absl::string_view record : absl::StrSplit(encoded, kRecordSep, absl::SkipEmpty())) {
    std::vector<std::string> fields = absl::StrSplit(record, kFieldSep);
    if (fields.size() == 3) {
      out.push_back({std::move(fields[0]), std::move(fields[1]), std::move(fields[2])});
    }
  }
  return out;
}

size_t OmittedViolationsOf(const absl::Status& status) {
  uint64_t omitted = 0;
  (void)absl::SimpleAtoi(Payload(status, kOmittedUrl), &omitted);
  return omitted;
}

std::map<std::string, std::string> MetadataOf(const absl::Status& status) {
  std::map<std::string, std::string> out;
  status.ForEachPayload([&out](absl::string_view url, const absl::Cord& value) {
    if (absl::ConsumePrefix(&url, kMetadataUrl)) out[std::string(url)] = std::string(value);
  });
  return out;
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  int64_t ns = 0;
  if (!absl::SimpleAtoi(Payload(status, kRetryUrl), &ns)) return std::nullopt;
  return absl::Nanoseconds(ns);
}

}  // namespace dorad
