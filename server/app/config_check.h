// The checks of a start before it loads anything: keys against each other, and against the file
// system. Pure function of both and therefore thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/platform/config/config.h"

namespace dorad {

// INVALID_ARGUMENT listing every problem, with the same reasons as a start. Without model.path the
// model is not checked.
absl::Status CheckStart(const Config& config);

}  // namespace dorad
