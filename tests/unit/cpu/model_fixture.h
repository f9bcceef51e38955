// Small checkpoints for the tests of the CPU backend's base model: a folder, its configuration and
// tensors, and loading them.
#pragma once

#include <ATen/ATen.h>

#include "server/backends/cpu/model.h"
#include "server/platform/files/safetensors_header.h"
#include "tests/unit/support/model_folder.h"
#include "tests/unit/support/safetensors_writer.h"

namespace dorad::model {

using nlohmann::json;
using ops::ComputeDType;
using test::MakeTensor;
using test::TestTensor;
using test::WriteSafetensors;

using Tensors = std::map<std::string, TestTensor>;

inline constexpr char kEmbedding[] = "model.embed_tokens.weight";
inline constexpr char kHead[] = "lm_head.weight";
inline constexpr char kUp[] = "model.layers.1.mlp.up_proj.weight";
inline constexpr char kNorm[] = "model.norm.weight";
inline constexpr char kSingle[] = "model.safetensors";
inline constexpr char kIndex[] = "model.safetensors.index.json";
inline const float kInf = std::numeric_limits<float>::infinity();

inline ModelConfig Config() {
  ModelConfig config;
  config.model_type = "llama";
  config.vocab_size = 6;
  config.hidden_size = 8;
  config.intermediate_size = 5;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  config.context_length = 16;
  config.layers.resize(2);
  config.NumberModules();
  return config;
}

// Small integers and halves: exact in every dtype. `seed` tells tensors apart.
inline TestTensor Fill(const std::string& dtype, const std::vector<int64_t>& shape, int seed) {
  int64_t elements = 1;
  for (const int64_t dimension : shape) elements *= dimension;
  std::vector<float> values(elements);
  for (int64_t i = 0; i < elements; ++i) {
    values[i] = static_cast<float>((i * 7 + seed * 13) % 31 - 15) / 2.0f;
  }
  return MakeTensor(dtype, shape, values);
}

inline Tensors Checkpoint(const ModelConfig& config, const std::string& dtype) {
  Tensors tensors;
  int seed = 0;
  const adapter::BaseModules modules = MakeModules(config);
  for (const adapter::BaseModule& module : modules.all()) {
    if (config.tied_embeddings && module.is_output_head) continue;
    tensors[module.name + ".weight"] = Fill(dtype, {module.rows, module.cols}, ++seed);
    const bool attention = module.name.find("self_attn") != std::string::npos;
    const bool output = module.name.find("o_proj") != std::string::npos;
    const bool mlp = module.name.find(".mlp.") != std::string::npos;
    const LayerSpec& layer = config.layers[0];
    if ((attention && (output ? layer.attention.output_bias : layer.attention.qkv_bias)) ||
        (mlp && layer.mlp.bias)) {
      tensors[module.name + ".bias"] = Fill(dtype, {module.rows}, ++seed);
    }
  }
  std::vector<std::string> norms = {"input_layernorm", "post_attention_layernorm"};
  if (config.layers[0].output_norms) {
    norms.insert(norms.end(), {"pre_feedforward_layernorm", "post_feedforward_layernorm"});
  }
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    for (const std::string& norm : norms) {
      tensors[layer + norm + ".weight"] = Fill(dtype, {config.hidden_size}, ++seed);
    }
    if (!config.layers[0].attention.qk_norm) continue;
    for (const std::string norm : {"self_attn.q_norm", "self_attn.k_norm"}) {
      tensors[layer + norm + ".weight"] = Fill(dtype, {config.head_dim}, ++seed);
    }
  }
  tensors[kNorm] = Fill(dtype, {config.hidden_size}, ++seed);
  return tensors;
}

using Loaded = absl::StatusOr<std::unique_ptr<LoadedModel>>;

inline Loaded LoadFrom(const ModelFolder& folder, const ModelConfig& config = Config(),
                       ComputeDType compute = ComputeDType::kF32, bool shareable = false) {
  return LoadedModel::Load(folder.path(), config, compute, ops::NormOptions(), shareable);
}

inline Loaded Load(const Tensors& tensors, const ModelConfig& config = Config(),
                   ComputeDType compute = ComputeDType::kF32) {
  const ModelFolder folder;
  folder.Write(kSingle, WriteSafetensors(tensors));
  return LoadFrom(folder, config, compute);
}

// The values of a tensor of a file, by ATen's own conversion.
inline at::Tensor Values(const TestTensor& tensor) {
  const at::ScalarType dtype = tensor.dtype == "F32"   ? at::kFloat
                               : tensor.dtype == "F16" ? at::kHalf
                                                       : at::kBFloat16;
  at::Tensor values = at::empty(tensor.shape, dtype);
  std::memcpy(values.data_ptr(), tensor.bytes.data(), tensor.bytes.size());
  return values.to(at::kFloat);
}

MATCHER_P2(Blames, field, reason, "") { return arg.field == field && arg.reason == reason; }

}  // namespace dorad::model
