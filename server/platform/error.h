// absl::Status with a stable reason, field violations and a retry hint attached as payloads.
//
// rpc turns these into google.rpc ErrorInfo, BadRequest and RetryInfo; every reason is listed in
// docs/reference/errors.md. Functions are pure and thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dorad {

// One problem of an input. `field` is a path in the caller's terms ("sampling.top_p",
// "adapter_config.json:lora_alpha", a tensor's name); `reason` is UPPER_SNAKE.
struct Violation {
  std::string field;
  std::string reason;
  std::string description;
};

// A status with a stable reason. REQUIRES: code != kOk; reason is UPPER_SNAKE.
absl::Status MakeError(absl::StatusCode code, std::string_view reason, std::string_view message);

// INVALID_ARGUMENT that lists the first 64 violations and counts the others; the message names the
// first few and the number of the rest.
// The reason is the first violation's, so a single problem keeps its own reason.
// omitted: further violations that are only counted. REQUIRES: !violations.empty().
absl::Status MakeInvalid(std::string_view subject, std::vector<Violation> violations,
                         size_t omitted = 0);

// The same status with a hint for the time of a retry.
absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after);

// The same status with one entry of ErrorInfo's metadata. key: lower_snake.
absl::Status WithMetadata(absl::Status status, std::string_view key, std::string_view value);

// Of an OUT_OF_MEMORY: no release of other memory would suffice.
inline constexpr char kNeverFits[] = "never_fits";

// Empty string, empty list, 0, empty map, nullopt when the status has none.
std::string ReasonOf(const absl::Status& status);
std::vector<Violation> ViolationsOf(const absl::Status& status);
size_t OmittedViolationsOf(const absl::Status& status);
std::map<std::string, std::string> MetadataOf(const absl::Status& status);
std::optional<absl::Duration> RetryAfterOf(const absl::Status& status);

}  // namespace dorad

#define DORAD_CONCAT_INNER_(a, b) a##b
#define DORAD_CONCAT_(a, b) DORAD_CONCAT_INNER_(a, b)

// Returns from the enclosing function when `expr` is not OK.
#define DORAD_RETURN_IF_ERROR(expr)                \
  do {                                             \
    absl::Status dorad_status_ = (expr);           \
    if (!dorad_status_.ok()) return dorad_status_; \
  } while (false)

// DORAD_ASSIGN_OR_RETURN(auto x, F()): x = *F(), or returns F()'s status.
#define DORAD_ASSIGN_OR_RETURN(lhs, expr) \
  DORAD_ASSIGN_OR_RETURN_(DORAD_CONCAT_(dorad_status_or_, __LINE__), lhs, expr)
#define DORAD_ASSIGN_OR_RETURN_(tmp, lhs, expr)  \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()
