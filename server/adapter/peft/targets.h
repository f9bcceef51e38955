// The modules of the base model that an adapter changes, with ranks and scales: PEFT's matching
// rules applied to the names of the base modules. Functions are thread-safe.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/peft_config.h"

namespace dorad::adapter {

struct Target {
  int module_id = 0;
  int rank = 0;
  double alpha = 0.0;
  double scale = 0.0;  // alpha / rank, or alpha / sqrt(rank)
};

// Ascending by module id, at least one. INVALID_ARGUMENT listing every violation:
// ADAPTER_NO_TARGETS, ADAPTER_TARGET_UNKNOWN (a name in target_modules that fits no module),
// ADAPTER_PATTERN_UNSUPPORTED, ADAPTER_PATTERNS_TOO_COSTLY.
absl::StatusOr<std::vector<Target>> ResolveTargets(const PeftConfig& config,
                                                   const BaseModules& modules);

}  // namespace dorad::adapter
