// Small models of the forms that the GPU's runner computes in different ways.
#pragma once

#include <cstdint>

#include "server/engine/kv_needs.h"
#include "tests/unit/cuda/small_model.h"

namespace dorad::cuda {

constexpr int64_t kMostBlocks = 8;  // of a sequence

// With norms of queries and keys, and heads of the attention kernel's own size.
inline model::ModelConfig SmallQwen3() {
  model::ModelConfig config = SmallModel(2);
  config.model_type = "qwen3";
  config.num_heads = 4;
  config.head_dim = 64;
  config.context_length = kMostBlocks * engine::kKvPageTokens;
  config.ropes[0].width = config.head_dim;
  for (model::LayerSpec& layer : config.layers) {
    layer.attention.qkv_bias = false;
    layer.attention.qk_norm = true;
    layer.attention.query_scalar = static_cast<double>(config.head_dim);
  }
  return config;
}

// With norms of outputs, a scaled embedding, and layers of two windows and two rotary tables.
inline model::ModelConfig SmallGemma3() {
  model::ModelConfig config = SmallQwen3();
  config.model_type = "gemma3_text";
  config.tied_embeddings = true;
  config.embedding_scale = 16.0;
  config.ropes.push_back(config.ropes[0]);
  config.ropes[1].theta = 500.0;
  model::LayerSpec sliding = config.layers[0];
  sliding.attention.query_scalar = 100.0;
  sliding.attention.rope = 1;
  sliding.attention.window = 12;
  sliding.mlp.activation = model::Activation::kGeluTanh;
  sliding.output_norms = true;
  model::LayerSpec full = sliding;
  full.attention.rope = 0;
  full.attention.window = 0;
  config.layers = {sliding, full, sliding};
  config.NumberModules();
  return config;
}

// With delta-nets, and attention whose heads have gates and turn in part.
inline model::ModelConfig SmallQwen35() {
  model::ModelConfig config = SmallQwen3();
  config.model_type = "qwen3_5_text";
  config.ropes[0].width = 16;
  config.delta = {2, 16, 16, 64, 4};
  model::LayerSpec attention = config.layers[0];
  attention.attention.output_gate = true;
  model::LayerSpec net = attention;
  net.delta.emplace();
  config.layers = {net, attention, net, attention};
  config.NumberModules();
  return config;
}

// The same with a KV cache in eight bits.
template <model::ModelConfig (*kConfig)()>
model::ModelConfig WithFp8Kv() {
  model::ModelConfig config = kConfig();
  config.fp8_kv = true;
  return config;
}

}  // namespace dorad::cuda
