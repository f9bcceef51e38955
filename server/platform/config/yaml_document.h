// Strict loading of one YAML document. Pure function and therefore thread-safe.
#pragma once

#include <string>

#include "yaml-cpp/yaml.h"

namespace dorad {

// Null for an empty text. Throws YAML::Exception; unlike YAML::Load also for text before or after
// the document.
YAML::Node LoadYamlDocument(const std::string& text);

}  // namespace dorad
