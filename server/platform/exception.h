// Turns exceptions of libraries into statuses. Thread-safe.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace dorad {

// The exception in flight as a status; call it inside a catch block. The exception's text goes to
// the log only, without a backtrace. RESOURCE_EXHAUSTED (OUT_OF_MEMORY) when an allocation failed,
// also one of libtorch's, else INTERNAL with `reason`. `what_failed` begins the message: "the
// step".
absl::Status StatusOfException(std::string_view what_failed, std::string_view reason);

}  // namespace dorad
