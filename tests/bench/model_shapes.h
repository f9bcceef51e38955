// The shapes of public models that benchmarks run with random weights: tools/model_shapes.json,
// which tools/make_random_model.py reads too. Each is a config.json as the server reads it, but for
// layer_types, which is repeated until every layer has one.
//
// Of the vision-language models there is the text part, and "tower": the rest of the whole model's
// config.json, whose text_config changes the text part (null: takes a key out). Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/model_config.h"

namespace dorad::bench {

// In alphabetical order.
std::vector<std::string> ModelShapeNames();

// layers: of the decoder, 0 for as many as the shape has. tower: the whole model, else its text
// part. INVALID_ARGUMENT for an unknown name or a model without a tower, and
// model::ReadModelConfig's statuses.
absl::StatusOr<model::ModelConfig> ReadModelShape(const std::string& name, int64_t layers,
                                                  bool tower = false);

}  // namespace dorad::bench
