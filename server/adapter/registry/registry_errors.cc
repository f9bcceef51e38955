#include "server/adapter/registry/registry_errors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/platform/config/edit_distance.h"
#include "server/platform/error.h"

namespace dorad::adapter {
namespace {

// Similar names, the most similar first.
std::vector<std::string> Nearest(const std::string& name, const std::vector<std::string>& known) {
  constexpr size_t kListedNames = 3;
  if (name.size() > kLongestComparedName) return {};
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& other : known) {
    if (other.size() > kLongestComparedName) continue;
    const size_t distance = EditDistance(name, other);
    if (IsNear(distance, name)) near.emplace_back(distance, other);
  }
  std::sort(near.begin(), near.end());
  near.resize(std::min(near.size(), kListedNames));
  std::vector<std::string> names;
  names.reserve(near.size());
  for (auto& [distance, other] : near) names.push_back(std::move(other));
  return names;
}

absl::Status WithVersions(absl::StatusCode code, const char* reason, const std::string& text,
                          const std::vector<int64_t>& ready) {
  if (ready.empty()) {
    return MakeError(code, reason, absl::StrCat(text, "; none of its versions is ready"));
  }
  const char* const newest = ready.size() >= kListedVersions ? "newest " : "";
  absl::Status status = MakeError(
      code, reason,
      absl::StrCat(text, "; its ", newest, "ready versions: ", absl::StrJoin(ready, ", ")));
  return WithMetadata(std::move(status), "ready_versions", absl::StrJoin(ready, ","));
}

const char* NameOf(AdapterState state) {
  switch (state) {
    case AdapterState::kLoading:
      return "loading";
    case AdapterState::kReady:
      return "ready";
    case AdapterState::kRetiring:
      return "retiring";
    case AdapterState::kGone:
      return "gone";
    case AdapterState::kFailed:
      return "failed";
  }
  return "unknown";
}

// The first problem and the number of the others; Get and List show the failure as a whole.
std::string Short(const absl::Status& failure) {
  const std::vector<Violation> problems = ViolationsOf(failure);
  if (problems.empty()) return std::string(failure.message());
  const size_t others = problems.size() - 1 + OmittedViolationsOf(failure);
  return absl::StrCat(problems.front().field, ": ", problems.front().description,
                      others > 0 ? absl::StrCat("; and ", others, " more") : "");
}

std::string WhyNotReady(const AdapterRecord& record) {
  switch (record.state) {
    case AdapterState::kFailed:
      return absl::StrCat("failed to load: ", ReasonOf(record.failure), ": ",
                          Short(record.failure));
    case AdapterState::kRetiring:
      return "has been retired and serves only the requests that hold it";
    case AdapterState::kGone:
      return "has been retired and is gone";
    default:
      return absl::StrCat("is ", NameOf(record.state), ", not ready");
  }
}

}  // namespace

absl::Status UnknownAdapter(const std::string& name, const std::vector<std::string>& known) {
  std::string text = absl::StrCat("there is no adapter named \"", name, "\"");
  const std::vector<std::string> nearest = Nearest(name, known);
  if (!nearest.empty())
    absl::StrAppend(&text, "; did you mean ", absl::StrJoin(nearest, ", "), "?");
  absl::Status status = MakeError(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND", text);
  status = WithMetadata(std::move(status), "adapter", name);
  if (nearest.empty()) return status;
  return WithMetadata(std::move(status), "nearest", absl::StrJoin(nearest, ","));
}

absl::Status UnknownVersion(const std::string& name, int64_t version,
                            const std::vector<int64_t>& ready) {
  return WithVersions(absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
                      absl::StrCat("there is no adapter version ", name, "@", version), ready);
}

absl::Status OtherDigest(const AdapterRecord& record, const std::string& wanted) {
  const std::string& digest = record.summary.digest;
  return WithMetadata(
      MakeError(
          absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
          absl::StrCat("adapter version ", record.name, "@", record.version,
                       " is another one: its digest is ",
                       digest.empty() ? "not known yet" : digest.substr(0, wanted.size()), ", not ",
                       wanted, "; after a restart without a store versions begin again at 1")),
      "digest", digest);
}

absl::Status NoActiveVersion(const std::string& name, const std::vector<int64_t>& ready) {
  return WithVersions(absl::StatusCode::kNotFound, "ADAPTER_NO_ACTIVE_VERSION",
                      absl::StrCat("adapter \"", name, "\" has no active version"), ready);
}

absl::Status NotReady(const AdapterRecord& record) {
  absl::Status status = MakeError(
      absl::StatusCode::kFailedPrecondition, "ADAPTER_NOT_READY",
      absl::StrCat("adapter version ", record.name, "@", record.version, " ", WhyNotReady(record)));
  status = WithMetadata(std::move(status), "state", NameOf(record.state));
  if (record.state != AdapterState::kFailed) return status;
  return WithMetadata(std::move(status), "failure_reason", ReasonOf(record.failure));
}

absl::Status VersionTaken(const std::string& name, int64_t version, int64_t last,
                          const AdapterRecord* holder) {
  std::string text = absl::StrCat("version ", version, " of \"", name, "\" is not above ", last,
                                  ", the highest one so far");
  const bool failed = holder != nullptr && holder->state == AdapterState::kFailed;
  if (failed) absl::StrAppend(&text, "; version ", version, " ", WhyNotReady(*holder));
  absl::Status status = MakeError(absl::StatusCode::kAborted, "ADAPTER_VERSION_TAKEN", text);
  if (!failed) return status;
  return WithMetadata(std::move(status), "failure_reason", ReasonOf(holder->failure));
}

absl::Status GenerationMismatch(int64_t expected, int64_t current) {
  absl::Status status =
      MakeError(absl::StatusCode::kAborted, "GENERATION_MISMATCH",
                absl::StrCat("expected generation ", expected, ", the registry is at ", current));
  return WithMetadata(std::move(status), "current_generation", absl::StrCat(current));
}

}  // namespace dorad::adapter
