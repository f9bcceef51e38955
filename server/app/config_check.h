// What a start would find wrong with a configuration before it loads anything: what no single key
// says. Pure function of the configuration and the file system, hence thread-safe.
#pragma once

#include "absl/status/status.h"
#include "server/base/config.h"

namespace dorad {

// INVALID_ARGUMENT listing every problem, each with the reason that the start would give. A model
// that is not named is not looked at.
absl::Status CheckStart(Config config);

}  // namespace dorad
