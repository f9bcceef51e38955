// What the server says about an exception of libtorch. Thread-safe.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace dorad::ops {

// To be called inside a catch block: the exception in flight as a status. Its text, which may carry
// a backtrace, goes to the log only. RESOURCE_EXHAUSTED OUT_OF_MEMORY when memory was not to be
// had, else INTERNAL with `reason`. `what_failed` begins the message: "the step".
absl::Status FromTorchException(std::string_view what_failed, std::string_view reason);

}  // namespace dorad::ops
