// A small Llama-like set of base modules and PEFT adapters for it, for tests of the adapter room.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "server/adapter/peft/base_modules.h"
#include "tests/unit/support/safetensors_writer.h"

namespace dorad::test {

inline constexpr int kVocabulary = 24, kHidden = 8, kKeyValue = 4, kInner = 12, kLayers = 3;

// Embedding, seven linears in each of three layers, output head.
inline adapter::BaseModules MakeModules() {
  using adapter::ModuleKind;
  std::vector<adapter::BaseModule> modules;
  modules.push_back(
      {"model.embed_tokens", ModuleKind::kEmbedding, kVocabulary, kHidden, false, -1});
  const auto linear = [&modules](int layer, const std::string& name, int rows, int cols) {
    modules.push_back({"model.layers." + std::to_string(layer) + "." + name, ModuleKind::kLinear,
                       rows, cols, false, layer});
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    linear(layer, "self_attn.q_proj", kHidden, kHidden);
    linear(layer, "self_attn.k_proj", kKeyValue, kHidden);
    linear(layer, "self_attn.v_proj", kKeyValue, kHidden);
    linear(layer, "self_attn.o_proj", kHidden, kHidden);
    linear(layer, "mlp.gate_proj", kInner, kHidden);
    linear(layer, "mlp.up_proj", kInner, kHidden);
    linear(layer, "mlp.down_proj", kHidden, kInner);
  }
  modules.push_back({"lm_head", ModuleKind::kLinear, kVocabulary, kHidden, true, -1});
  return adapter::BaseModules(std::move(modules));
}

// The configuration as PEFT 0.21 writes it, with the given targets.
inline nlohmann::ordered_json MakeConfig(bool use_dora, const std::vector<std::string>& targets,
                                         int rank = 2, double alpha = 4) {
  nlohmann::ordered_json config;
  for (const char* key : {"alora_invocation_tokens",
                          "arrow_config",
                          "auto_mapping",
                          "base_model_name_or_path",
                          "corda_config",
                          "eva_config",
                          "exclude_modules",
                          "kasa_config",
                          "layer_replication",
                          "layers_pattern",
                          "layers_to_transform",
                          "lora_ga_config",
                          "megatron_config",
                          "modules_to_save",
                          "monteclora_config",
                          "revision",
                          "target_parameters",
                          "trainable_token_indices",
                          "use_bdlora",
                          "velora_config"}) {
    config[key] = nullptr;
  }
  for (const char* key : {"ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_qalora"}) {
    config[key] = false;
  }
  for (const char* key : {"alpha_pattern", "rank_pattern", "loftq_config"}) {
    config[key] = nlohmann::ordered_json::object();
  }
  config["bias"] = "none";
  config["inference_mode"] = true;
  config["init_lora_weights"] = true;
  config["lora_dropout"] = 0.0;
  config["megatron_core"] = "megatron.core";
  config["peft_type"] = "LORA";
  config["peft_version"] = "0.21.0";
  config["qalora_group_size"] = 16;
  config["task_type"] = "CAUSAL_LM";
  config["use_rslora"] = false;
  config["r"] = rank;
  config["lora_alpha"] = alpha;
  config["use_dora"] = use_dora;
  config["target_modules"] = targets;
  return config;
}

using Tensors = std::map<std::string, TestTensor>;

// Values with few bits, so that every dtype holds them exactly.
inline TestTensor RandomTensor(const std::string& dtype, std::vector<int64_t> shape,
                               std::mt19937& random) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 65) + 1) / 64;
  return MakeTensor(dtype, std::move(shape), values);
}

// Adds one module's tensors under PEFT's keys.
inline void AddModule(Tensors& tensors, const adapter::BaseModule& module, int rank, bool use_dora,
                      std::mt19937& random, const std::string& dtype = "F32") {
  const std::string stem = "base_model.model." + module.name;
  const bool linear = module.kind == adapter::ModuleKind::kLinear;
  const int64_t inner = linear ? module.cols : module.rows;
  const int64_t outer = linear ? module.rows : module.cols;
  tensors[stem + (linear ? ".lora_A.weight" : ".lora_embedding_A")] =
      RandomTensor(dtype, {rank, inner}, random);
  tensors[stem + (linear ? ".lora_B.weight" : ".lora_embedding_B")] =
      RandomTensor(dtype, {outer, rank}, random);
  if (use_dora) {
    tensors[stem + ".lora_magnitude_vector"] = RandomTensor(dtype, {outer}, random);
  }
}

// Tensors for every module whose name ends in ".suffix" (or is it) for one of the suffixes.
inline Tensors MakeTensors(const adapter::BaseModules& modules,
                           const std::vector<std::string>& suffixes, int rank, bool use_dora,
                           const std::string& dtype = "F32", unsigned seed = 1) {
  std::mt19937 random(seed);
  Tensors tensors;
  for (const adapter::BaseModule& module : modules.all()) {
    for (const std::string& suffix : suffixes) {
      if (("." + module.name).ends_with("." + suffix)) {
        AddModule(tensors, module, rank, use_dora, random, dtype);
        break;
      }
    }
  }
  return tensors;
}

}  // namespace dorad::test
