// The modules of the base model that an adapter changes, with ranks and scales: PEFT's matching
// rules applied to the names of the base modules. Functions are thread-safe.
#pragma once

#include <vector>

#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/peft_config.h"
#include "server/adapter/peft/violations.h"

namespace dorad::adapter {

struct Target {
  int module_id = 0;
  int rank = 0;  // 0: the configuration's rank was refused
  double alpha = 0.0;
  double scale = 0.0;  // alpha / rank, or alpha / sqrt(rank)
};

struct Targets {
  std::vector<Target> list;  // ascending by module id
  // False after a violation: the configuration may be meant to target other modules, too.
  bool complete = true;
};

// At least one target, or a violation. Adds every violation: ADAPTER_NO_TARGETS,
// ADAPTER_TARGET_UNKNOWN (a name in target_modules that fits no module), ADAPTER_PART_NOT_SERVED,
// ADAPTER_PATTERN_UNSUPPORTED, ADAPTER_PATTERNS_TOO_COSTLY.
Targets ResolveTargets(const PeftConfig& config, const BaseModules& modules,
                       Violations& violations);

}  // namespace dorad::adapter
