// The registry's errors: a message for people and metadata for programs. Pure functions and
// therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/adapter/registry/record.h"

namespace dorad::adapter {

// The newest versions are listed, at most this many.
inline constexpr size_t kListedVersions = 8;

// NOT_FOUND (ADAPTER_NOT_FOUND). Lists the names in `known` that are similar to `name`, also as
// metadata "nearest".
absl::Status UnknownAdapter(const std::string& name, const std::vector<std::string>& known);
// NOT_FOUND (ADAPTER_NOT_FOUND). `ready`: the name's newest READY versions, ascending; also as
// metadata "ready_versions".
absl::Status UnknownVersion(const std::string& name, int64_t version,
                            const std::vector<int64_t>& ready);
// NOT_FOUND (ADAPTER_NOT_FOUND): the version with this number is another one than the reference's.
// With the metadata "digest".
absl::Status OtherDigest(const AdapterRecord& record, const std::string& wanted);
// NOT_FOUND (ADAPTER_NO_ACTIVE_VERSION). `ready` as above.
absl::Status NoActiveVersion(const std::string& name, const std::vector<int64_t>& ready);
// FAILED_PRECONDITION (ADAPTER_NOT_READY), with the metadata "state" and, of a version that failed,
// "failure_reason".
absl::Status NotReady(const AdapterRecord& record);
// ABORTED (ADAPTER_VERSION_TAKEN): `last` is the name's highest number so far. `holder`: the
// version with this number, or nullptr; if it failed, with the metadata "failure_reason".
absl::Status VersionTaken(const std::string& name, int64_t version, int64_t last,
                          const AdapterRecord* holder);
// ABORTED (GENERATION_MISMATCH), with the metadata "current_generation".
absl::Status GenerationMismatch(int64_t expected, int64_t current);

}  // namespace dorad::adapter
