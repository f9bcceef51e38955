// The keys that a running server takes over when its configuration is read again. Pure functions,
// hence thread-safe.
#pragma once

#include <string>
#include <vector>

#include "server/platform/config/config.h"
#include "server/platform/config/config_schema.h"

namespace dorad {

bool IsReloadable(const ConfigKey& key);

struct ConfigChanges {
  // "section.key" of each key with another value: `applied` were taken over, `waiting` need a
  // restart.
  std::vector<std::string> applied;
  std::vector<std::string> waiting;
};

// Gives the reloadable keys of *current their values in `next`.
ConfigChanges TakeReloadable(Config next, Config* current);

}  // namespace dorad
