// The base model's weights on the GPU, read once from a Hugging Face folder. Matrices are bf16 in
// the files' row-major layout; those with a common input are adjacent (q, k, v; gate, up) and form
// one product. Biases and norms are fp32. Sleep can release the device memory; pointers to it stay
// valid. Leased weights are not released.
//
// Owned by the CUDA backend. Thread-safe; a computation with the weights needs a Use, or no
// concurrent Sleep.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/isa/isa.h"
#include "server/adapter/peft/base_modules.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/mapped_memory.h"
#include "server/backends/cuda/pinned_pages.h"
#include "server/model/model_config.h"
#include "server/model/weight_layout.h"
#include "server/platform/files/safetensors.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::cuda {

// Linear modules of consecutive ids that share their input, stacked by rows.
struct LinearGroup {
  const __nv_bfloat16* weight = nullptr;  // [out, in]
  const float* bias = nullptr;            // [out], or null
  int64_t in = 0;
  int64_t out = 0;
  int first_module = 0;
  std::vector<int64_t> outs;  // of the modules, in order
};

// Of a gated delta-net.
struct DeltaWeights {
  LinearGroup qkvz, ba, out;
  const float* convolution = nullptr;  // [qkv_size, 1, convolution]
  const float* decay_log = nullptr;    // [value_heads]
  const float* time_bias = nullptr;    // [value_heads]
  const float* norm = nullptr;         // [value_dim]
};

struct LayerWeights {
  LinearGroup qkv, o;  // of attention
  DeltaWeights delta;  // in its place
  LinearGroup gate_up, down;
  const float* attention_norm = nullptr;
  const float* mlp_norm = nullptr;
  const float* attention_output_norm = nullptr;  // null where the layer has none, as the next
  const float* mlp_output_norm = nullptr;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
};

struct TowerNormWeights {
  const float* weight = nullptr;
  const float* bias = nullptr;  // null: root-mean-square norms
};

// Of model::VisionConfig.
struct TowerWeights {
  struct Block {
    TowerNormWeights norm1, norm2;
    LinearGroup qkv, proj, fc1, fc2;  // fc1: with a gate, both
  };
  struct Merger {
    TowerNormWeights norm;
    LinearGroup join;  // of TowerStyle::joins_patches
    LinearGroup fc1, fc2;
    // In their place, of TowerStyle::pools_patches.
    const float* pooled_norm = nullptr;
    LinearGroup projection;  // no module
  };
  LinearGroup patch;             // no module
  const float* table = nullptr;  // [table_side², width], or null
  TowerNormWeights patch_norm;   // of TowerStyle::patch_norm
  std::vector<Block> blocks;
  Merger merger;
  std::vector<Merger> deepstack_mergers;
};

class CudaModel {
 public:
  // Of a configuration's weights on the device.
  static int64_t BytesFor(model::ModelConfig config);
  // model::ImportWeights' statuses and OUT_OF_MEMORY. The ledger is borrowed; kind "weights".
  // `shareable`: they can be leased. isa: of the kernels that compute with them.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Load(
      const std::string& dir, model::ModelConfig config, MemoryLedger* ledger, bool shareable,
      kernels::KernelIsa isa = kernels::BestIsa());

  // Random weights of a configuration's shapes, for benchmarks: matrices uniform in ±0.035
  // (standard deviation 0.02), biases 0, norms 1.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Random(
      model::ModelConfig config, uint32_t seed, MemoryLedger* ledger,
      kernels::KernelIsa isa = kernels::BestIsa());

  // Keeps the weights in device memory while it lives, on the thread that got it.
  class Use {
   public:
    explicit Use(absl::Mutex* mu) : mu_(mu) {}
    Use(Use&& other) noexcept : mu_(std::exchange(other.mu_, nullptr)) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (mu_ != nullptr) mu_->ReaderUnlock();
    }

   private:
    absl::Mutex* mu_;
  };
  // UNAVAILABLE (SERVER_SLEEPING).
  absl::StatusOr<Use> UseWeights() const;

  // Copies the weights to page-locked memory: Wake then copies them back at the link's speed.
  absl::Status KeepHostCopy();
  // Waits for all uses and releases the device memory; returns the bytes. 0: it was asleep, or is
  // leased and will be released with the last lease.
  int64_t Sleep();
  // Restores the weights from the host copy or the files; leased weights are still there.
  // OUT_OF_MEMORY, the statuses of Load, DATA_LOSS (MODEL_CHANGED) when the files have changed:
  // still asleep.
  absl::Status Wake();

  // Begins a lease: the memory stays until EndSharing. UNAVAILABLE (SERVER_SLEEPING); does not wait
  // for a Sleep or Wake. REQUIRES: shareable.
  absl::Status BeginSharing();
  // Ends a lease. If the weights sleep, the last lease waits for uses and releases the memory.
  void EndSharing();
  // Descriptors of the memory's pieces from `first` on, at most `max`. INTERNAL (CUDA_ERROR).
  // REQUIRES: a lease.
  absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const;
  int64_t shared_bytes() const { return leased() ? memory_.size() : 0; }
  // nullptr unless shareable.
  const model::WeightLayout* layout() const { return layout_.tensors.empty() ? nullptr : &layout_; }

  const model::ModelConfig& config() const { return config_; }
  const adapter::BaseModules& modules() const { return modules_; }
  kernels::KernelIsa isa() const { return isa_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const LinearGroup& head() const { return head_; }
  const TowerWeights& tower() const { return tower_; }  // empty: none is served
  const __nv_bfloat16* embedding() const { return matrices_[config_.embedding]; }
  const float* final_norm() const { return final_norm_; }
  // [rows, cols] of the module.
  const __nv_bfloat16* Weight(int module_id) const { return matrices_[module_id]; }
  DType CheckpointDtype(int module_id) const { return dtypes_[module_id]; }

  const std::string& digest() const { return digest_; }
  int64_t num_parameters() const { return num_parameters_; }
  int64_t bytes() const { return memory_.bytes(); }

 private:
  class Places;
  class Sink;
  CudaModel(model::ModelConfig config, kernels::KernelIsa isa);

  const model::ModelConfig config_;
  const kernels::KernelIsa isa_;
  const adapter::BaseModules modules_;
  absl::Status Restore();
  // Unmaps the memory if it is mapped, asleep and not leased. REQUIRES: mu_ is held for writing.
  bool LetGo();
  bool asleep() const {
    absl::MutexLock lock(&state_mu_);
    return asleep_;
  }
  bool leased() const {
    absl::MutexLock lock(&state_mu_);
    return shares_ > 0;
  }

  std::string dir_;  // "": random weights
  bool shareable_ = false;
  MemoryLedger* ledger_ = nullptr;
  mutable absl::Mutex mu_;  // uses hold it for reading; map and unmap for writing
  mutable absl::Mutex state_mu_ ABSL_ACQUIRED_AFTER(mu_);
  bool asleep_ ABSL_GUARDED_BY(state_mu_) = false;  // or waits for uses to end
  int shares_ ABSL_GUARDED_BY(state_mu_) = 0;       // does not rise while asleep_
  MappedMemory memory_;
  model::WeightLayout layout_;
  std::unique_ptr<PinnedPages> host_;  // nullptr: no copy
  PinnedPages::Pages host_pages_;
  std::vector<LayerWeights> layers_;
  LinearGroup head_;
  TowerWeights tower_;
  const float* final_norm_ = nullptr;
  std::vector<const __nv_bfloat16*> matrices_;  // by module id
  std::vector<DType> dtypes_;                   // by module id
  std::string digest_;
  int64_t num_parameters_ = 0;
};

}  // namespace dorad::cuda
