// The vision_config of config.json: one reader for each family with a tower. Torch-free. Pure
// functions and therefore thread-safe.
#pragma once

#include "server/model/config_json.h"
#include "server/model/model_config.h"

namespace dorad::model {

// root: of config.json. text: its sizes are set. REQUIRES: root has a vision_config.
VisionConfig ReadQwen3Vision(Fields& root, const ModelConfig& text);
VisionConfig ReadQwen35Vision(Fields& root, const ModelConfig& text);
VisionConfig ReadQwen25Vision(Fields& root, const ModelConfig& text);
VisionConfig ReadMistral3Vision(Fields& root, const ModelConfig& text);
VisionConfig ReadGemma3Vision(Fields& root, const ModelConfig& text);

}  // namespace dorad::model
