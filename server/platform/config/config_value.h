// One configuration value: from text or YAML into its field, and back. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "server/platform/config/config_schema.h"

namespace YAML {
class Node;
}

namespace dorad {

// "1048576", "512MiB", "2GiB": whole numbers, optionally with KiB, MiB, GiB or TiB. False for other
// text.
bool ParseBytes(const std::string& text, int64_t* value);

// Both return the problem with the value, or "" after setting the field.
std::string SetFromText(const ConfigKey& key, const std::string& text, Config* config);
std::string SetFromYaml(const ConfigKey& key, const YAML::Node& node, Config* config);

// Adds or replaces one entry. REQUIRES: key.type == ConfigType::kMap.
std::string SetMapEntry(const ConfigKey& key, const std::string& name, const std::string& value,
                        Config* config);

// The value as YAML on one line, or for a map with entries one indented line each.
std::string ValueToYaml(const ConfigKey& key, Config* config);

}  // namespace dorad
