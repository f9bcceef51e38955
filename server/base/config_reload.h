// Which keys a running server takes over when its configuration is read again. Pure functions,
// hence thread-safe.
#pragma once

#include <string>
#include <vector>

#include "server/base/config.h"
#include "server/base/config_schema.h"

namespace dorad {

bool IsReloadable(const ConfigKey& key);

struct ConfigChanges {
  // "section.key" of keys whose value differs: taken over, or in need of a restart.
  std::vector<std::string> applied;
  std::vector<std::string> waiting;
};

// Gives the reloadable keys of *current their values in `next`.
ConfigChanges TakeReloadable(Config next, Config* current);

}  // namespace dorad
