#include "tests/bench/model_shapes.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "model_shapes_json.h"  // made by CMake from tools/model_shapes.json

namespace dorad::bench {
namespace {

using Json = nlohmann::json;

const Json& Table() {
  static const Json* const kTable = new Json(Json::parse(kModelShapesJson));
  return *kTable;
}

}  // namespace

std::vector<std::string> ModelShapeNames() {
  std::vector<std::string> names;
  for (const auto& [name, config] : Table().items()) names.push_back(name);
  return names;
}

absl::StatusOr<model::ModelConfig> ReadModelShape(const std::string& name, int64_t layers,
                                                  bool tower) {
  const auto found = Table().find(name);
  if (found == Table().end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("no shape ", name, "; there are: ", absl::StrJoin(ModelShapeNames(), ", ")));
  }
  Json config = *found;
  if (layers > 0) config["num_hidden_layers"] = layers;
  if (config.contains("layer_types")) {
    const Json pattern = config["layer_types"];
    Json& types = config["layer_types"] = Json::array();
    for (int64_t i = 0; i < config["num_hidden_layers"]; ++i) {
      types.push_back(pattern[i % pattern.size()]);
    }
  }
  const Json parts = config.contains("tower") ? config["tower"] : Json();
  config.erase("tower");
  if (tower) {
    if (parts.is_null()) return absl::InvalidArgumentError(absl::StrCat(name, " has no tower"));
    Json whole = parts;
    config.merge_patch(parts["text_config"]);
    whole["text_config"] = std::move(config);
    config = std::move(whole);
  }
  // The server reads folders: what it makes of this one is what it would make of the model's own.
  std::string dir = (std::filesystem::temp_directory_path() / "dorad-shape-XXXXXX").string();
  if (mkdtemp(dir.data()) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat("making ", dir));
  }
  std::ofstream(std::filesystem::path(dir) / "config.json") << config;
  absl::StatusOr<model::ModelConfig> result = model::ReadModelConfig(dir);
  std::filesystem::remove_all(dir);
  return result;
}

}  // namespace dorad::bench
