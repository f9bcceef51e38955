// How much memory of the host this process can take.
// The functions are thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace dorad {

// Bytes, as the kernel estimates them without swapping, and within the limits of the process's
// control groups (version 2). INT64_MAX: nobody says. `root` is where /proc and /sys are.
int64_t AvailableHostMemory(const std::string& root = "");

// Bytes that it could take if nobody else had any: the host's RAM, and the limits as above.
int64_t TotalHostMemory(const std::string& root = "");

// RESOURCE_EXHAUSTED (OUT_OF_MEMORY) unless `bytes` fit and a tenth of what is available stays.
// `what` begins the message: "keeping the KV cache".
absl::Status CheckHostMemory(int64_t bytes, int64_t available, const std::string& what);

}  // namespace dorad
