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
  config.num_layers = layers;
  config.num_heads = 8;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.qkv_bias = true;
  config.windows.assign(layers, 0);
  return config;
}

}  // namespace dorad::cuda
