// Converts absl::Status with the payloads of server/platform/error.h to a grpc::Status with
// google.rpc.Status details (AIP-193). Pure functions and therefore thread-safe.
#pragma once

#include <grpcpp/support/status.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace dorad::rpc {

// The trailers of a call must fit into 8 KiB, with the message percent-encoded and the details in
// base64.
inline constexpr size_t kMaxMessageBytes = 1024;
inline constexpr size_t kMaxDetailsBytes = 4096;

// Details: ErrorInfo (always; a status without a reason gets its code's name), BadRequest with as
// many violations as fit and then one that counts the rest, RetryInfo. The status's metadata and
// `metadata` go into ErrorInfo. Texts become valid UTF-8 and are cut to their limits.
grpc::Status ToGrpc(const absl::Status& status,
                    const std::map<std::string, std::string>& metadata = {});

// The text as well-formed UTF-8 of at most max_bytes, ending in "..." when it was cut, with '?' for
// control characters and invalid UTF-8: receivers refuse invalid UTF-8 in a string field, and a
// caller's text must not start a new line in a log. REQUIRES: max_bytes >= 3.
std::string Presentable(const std::string& text, size_t max_bytes);

// The value of grpc-retry-pushback-ms: the retry hint, "-1" (do not retry) for RESOURCE_EXHAUSTED
// without one, else nullopt.
std::optional<std::string> RetryPushback(const absl::Status& status);

// "OK", "INVALID_ARGUMENT", ...
const char* CodeName(absl::StatusCode code);

}  // namespace dorad::rpc
