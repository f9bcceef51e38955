// Validates the common fields of the Publish calls, Activate and Retire: names, versions, tags,
// configurations, and the options of a publish. Each check adds its problems to `violations`. Pure
// functions and therefore thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dorad/v1/adapters.pb.h"
#include "server/adapter/publish/publisher.h"
#include "server/platform/error.h"

namespace dorad::rpc {

inline constexpr size_t kMaxAdapterConfigBytes = 1 << 20;
inline constexpr size_t kMaxPathBytes = 4095;  // as the kernel's PATH_MAX

void CheckAdapterName(const std::string& name, std::vector<Violation>* violations);
// Checks an exact version, for Activate and Retire. INVALID_ARGUMENT about `subject`.
absl::Status CheckAdapterVersion(const char* subject, const std::string& name, int64_t version,
                                 const std::string& digest);

// UPLOAD_ID_INVALID unless it is 1 to 128 of [A-Za-z0-9._-].
void CheckUploadId(const std::string& id, std::vector<Violation>* violations);

// PUBLISH_SHA256_INVALID unless the field has 32 bytes.
void CheckSha256(const char* field, const std::string& sha256, std::vector<Violation>* violations);

// PATH_EMPTY, PATH_TOO_LONG, PATH_NOT_ABSOLUTE.
void CheckPath(const std::string& path, std::vector<Violation>* violations);

// The options of a publish, with its checks of name, version and tags. Wire: PublishBegin,
// PublishFromPathRequest, PublishFromMemoryRequest or PublishFromPeerRequest.
template <typename Wire>
adapter::PublishOptions ParsePublishOptions(const Wire& wire, std::vector<Violation>* violations);

// The configuration of a publish as JSON: PUBLISH_CONFIG_TWICE unless it is given once, as
// PeftConfig or as text, and PUBLISH_CONFIG_SIZE. Wire: PublishBegin or PublishFromMemoryRequest.
template <typename Wire>
std::string ParseAdapterConfig(const Wire& wire, std::vector<Violation>* violations);

}  // namespace dorad::rpc
