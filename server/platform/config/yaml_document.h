// Strict loading of one YAML document. Pure function, hence thread-safe.
#pragma once

#include <string>

#include "yaml-cpp/yaml.h"

namespace dorad {

// Null for an empty text. Throws YAML::Exception; unlike YAML::Load also for text that comes after
// the document, or before it and belongs to none.
YAML::Node LoadYamlDocument(const std::string& text);

}  // namespace dorad
