// The base model's weights in serving layout, read once from a Hugging Face folder
// (model.safetensors, or the shards that model.safetensors.index.json names).
// Immutable after loading, except for the cache of squared norms, which has a lock: thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/backends/cpu/adapter_weights.h"
#include "server/backends/cpu/ops/dora_linear.h"
#include "server/backends/cpu/ops/dora_norm.h"
#include "server/model/model_config.h"
#include "server/model/weight_layout.h"
#include "server/platform/process/sealed_memory.h"

namespace dorad::model {

// Of a delta-net. All but the linears are fp32.
struct DeltaWeights {
  ops::BaseLinear qkv, z, b, a, out;
  at::Tensor convolution;           // [qkv_size, 1, convolution]
  at::Tensor decay_log, time_bias;  // [value_heads]
  at::Tensor norm;                  // [value_dim]
};

// Norm weights are fp32; undefined where the family has none.
struct LayerWeights {
  DeltaWeights delta;  // in place of q, k, v and o
  ops::BaseLinear q, k, v, o, gate, up, down;
  at::Tensor attention_norm, mlp_norm;
  at::Tensor attention_output_norm, mlp_output_norm;
  at::Tensor q_norm, k_norm;  // [head_dim]
};

// Of a tower. bias: undefined for a root-mean-square norm.
struct TowerNormWeights {
  at::Tensor weight, bias;
};

struct VisionBlockWeights {
  TowerNormWeights norm1, norm2;
  ops::BaseLinear qkv, k, v, proj, fc1, up, fc2;  // as VisionBlockSpec
};

struct MergerWeights {
  TowerNormWeights norm, pooled_norm;
  ops::BaseLinear join, fc1, fc2;
  ops::BaseLinear projection;  // of pooled patches
};

// Biases, norms and the position table are fp32.
struct VisionWeights {
  ops::BaseLinear patch;  // [width, patch_elements]
  TowerNormWeights patch_norm;
  at::Tensor table_PD;  // one row for each position
  std::vector<VisionBlockWeights> blocks;
  MergerWeights merger;
  std::vector<MergerWeights> deepstack_mergers;
  std::vector<TowerNormWeights*> norms;  // by WeightSlot::index
};

struct ModelWeights {
  at::Tensor embedding_VD;
  ops::BaseLinear head;  // shares the embedding's storage when tied
  at::Tensor final_norm;
  std::vector<LayerWeights> layers;
  VisionWeights vision;                   // empty without a tower
  std::vector<ops::BaseLinear*> linears;  // by module id; the embedding has none
};

class LoadedModel final : public adapter::BaseWeightSource {
 public:
  // Storage: compute kF32 keeps bf16 checkpoints in bf16 (their value is exact and half the bytes)
  // and turns fp16 into fp32; kBF16 rounds everything to bf16. Biases and norm weights: fp32.
  // `shareable`: the weights lie in sealed memory that other processes can map. ImportWeights'
  // statuses and RESOURCE_EXHAUSTED (OUT_OF_MEMORY).
  static absl::StatusOr<std::unique_ptr<LoadedModel>> Load(const std::string& dir,
                                                           ModelConfig config,
                                                           ops::ComputeDType compute,
                                                           ops::NormOptions norm_options,
                                                           bool shareable);

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const adapter::BaseModules& modules() const { return modules_; }
  ops::ComputeDType compute() const { return compute_; }
  // Identifies the checkpoint's content, independent of its division into files
  // (Checkpoint::Digest).
  const std::string& digest() const { return digest_; }
  int64_t num_parameters() const { return num_parameters_; }
  int64_t bytes() const { return bytes_; }
  // nullptr unless shareable.
  const WeightLayout* layout() const { return layout_.tensors.empty() ? nullptr : &layout_; }
  // The memory of the weights. REQUIRES: shareable.
  const SealedMemory& memory() const { return memory_; }
  // Bytes of the cached squared norms so far, and how many modules have one.
  int64_t norm_cache_bytes() const;
  int norm_cache_entries() const;

  // adapter::BaseWeightSource
  at::Tensor Weight(int module_id) const override;
  at::Tensor SquaredNorms(int module_id) override;
  at::ScalarType CheckpointDtype(int module_id) const override;

 private:
  LoadedModel(ModelConfig config, ops::ComputeDType compute, ops::NormOptions norm_options);

  const ModelConfig config_;
  const ops::ComputeDType compute_;
  const ops::NormOptions norm_options_;
  const adapter::BaseModules modules_;
  SealedMemory memory_;  // of shareable weights; outlives them
  WeightLayout layout_;
  ModelWeights weights_;
  std::vector<at::ScalarType> checkpoint_dtypes_;  // by module id
  std::string digest_;
  int64_t num_parameters_ = 0;
  int64_t bytes_ = 0;
  mutable absl::Mutex mu_;
  std::vector<at::Tensor> squared_norms_ ABSL_GUARDED_BY(mu_);  // by module id
  std::set<int> computing_ ABSL_GUARDED_BY(mu_);  // modules whose norms a caller is computing
};

}  // namespace dorad::model
