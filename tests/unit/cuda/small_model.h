// What tests of whole models on the GPU share.
#pragma once

#include "server/model/model_config.h"
#include "tests/unit/support/test.h"

namespace dorad::cuda {

template <typename T>
T Must(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return *std::move(value);
}

// Qwen2's form: with biases.
inline model::ModelConfig SmallModel(int64_t layers) {
  model::ModelConfig config;
  config.model_type = "qwen2";
  config.vocab_size = 1000;
  config.hidden_size = 256;
  config.intermediate_size = 640;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.ropes[0].width = config.head_dim;
  model::LayerSpec layer;
  layer.attention.qkv_bias = true;
  layer.attention.query_scalar = static_cast<double>(config.head_dim);
  config.layers.assign(layers, layer);
  config.NumberModules();
  return config;
}

}  // namespace dorad::cuda
