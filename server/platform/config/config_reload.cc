#include "server/platform/config/config_reload.h"

#include <set>
#include <type_traits>
#include <variant>

#include "server/platform/config/config_value.h"

namespace dorad {
namespace {

void Copy(const ConfigKey& key, Config* from, Config* to) {
  const ConfigField source = key.field(*from);
  std::visit(
      [&source](auto* target) { *target = *std::get<std::decay_t<decltype(target)>>(source); },
      key.field(*to));
}

}  // namespace

bool IsReloadable(const ConfigKey& key) {
  static const std::set<std::string>* const single = new std::set<std::string>{
      "server.drain_delay_seconds", "server.drain_timeout_seconds",
      "server.default_deadline_seconds", "engine.gpu_share", "adapters.keep_last"};
  const std::string section = key.section;
  return section == "limits" || section == "log" || single->count(key.path()) > 0;
}

ConfigChanges TakeReloadable(Config next, Config* current) {
  ConfigChanges changes;
  for (const ConfigKey& key : ConfigKeys()) {
    if (ValueToYaml(key, &next) == ValueToYaml(key, current)) continue;
    if (!IsReloadable(key)) {
      changes.waiting.push_back(key.path());
      continue;
    }
    Copy(key, &next, current);
    changes.applied.push_back(key.path());
  }
  return changes;
}

}  // namespace dorad
