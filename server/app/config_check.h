// Checks a configuration as a start does before it loads anything: keys against each other, and
// against the file system. Pure function of both, hence thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/platform/config/config.h"

namespace dorad {

// INVALID_ARGUMENT listing every problem, each with the reason that the start would give. Without
// model.path the model is not checked.
absl::Status CheckStart(const Config& config);

}  // namespace dorad
