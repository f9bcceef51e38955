// The keys that a reload changes in a running server. Pure functions and therefore thread-safe.
#pragma once

#include <string>
#include <vector>

#include "server/platform/config/config.h"
#include "server/platform/config/config_schema.h"

namespace dorad {

bool IsReloadable(const ConfigKey& key);

struct ConfigChanges {
  // "section.key" of each key with another value: `applied` have changed, `waiting` need a restart.
  std::vector<std::string> applied;
  std::vector<std::string> waiting;
};

// Copies the reloadable keys of `next` to *current.
ConfigChanges TakeReloadable(Config next, Config* current);

}  // namespace dorad
