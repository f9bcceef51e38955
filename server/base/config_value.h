// One configuration value: from text or YAML into its field, and back. Thread-safe.
#pragma once

#include <string>

#include "server/base/config_schema.h"

namespace YAML {
class Node;
}

namespace dorad {

// Both return what is wrong with the value, or "" after setting the field.
std::string SetFromText(const ConfigKey& key, const std::string& text, Config* config);
std::string SetFromYaml(const ConfigKey& key, const YAML::Node& node, Config* config);

// Adds or replaces one entry. REQUIRES: key.type == ConfigType::kMap.
std::string SetMapEntry(const ConfigKey& key, const std::string& name, const std::string& value,
                        Config* config);

// The value as YAML on one line, or for a map with entries one indented line each.
std::string ValueToYaml(const ConfigKey& key, Config* config);

}  // namespace dorad
