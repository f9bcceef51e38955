// Reading small and large files into memory with a size cap and one way to report failures.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dorad {

// The bytes of a regular file. NOT_FOUND (FILE_NOT_FOUND), RESOURCE_EXHAUSTED (FILE_TOO_LARGE),
// UNAVAILABLE (FILE_UNREADABLE; also for anything that is not a regular file).
absl::StatusOr<std::vector<std::byte>> ReadFileBytes(const std::string& path, uint64_t max_bytes);

// As ReadFileBytes, as text.
absl::StatusOr<std::string> ReadFileText(const std::string& path, uint64_t max_bytes);

}  // namespace dorad
