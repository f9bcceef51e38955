// Reports the host memory available to this process. The functions are thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace dorad {

// Available bytes: the kernel's estimate without swapping, and no more than the limits of the
// process's control groups (version 2). INT64_MAX: unknown. `root`: the folder of /proc and /sys.
int64_t AvailableHostMemory(const std::string& root = "");

// Bytes available to the process if no other process used memory: the host's RAM, with the same
// limits.
int64_t TotalHostMemory(const std::string& root = "");

// RESOURCE_EXHAUSTED (OUT_OF_MEMORY) unless `bytes` fit and a tenth of `available` stays free.
// `what` begins the message: "keeping the KV cache".
absl::Status CheckHostMemory(int64_t bytes, int64_t available, const std::string& what);

}  // namespace dorad
