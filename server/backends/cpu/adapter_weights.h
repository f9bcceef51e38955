// The tensors of one adapter version on the CPU, and the base weights for its norms. The one header
// of this room that includes torch. Immutable after construction and therefore thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "server/adapter/registry/version.h"
#include "server/backends/cpu/ops/dora_linear.h"

namespace dorad::adapter {

struct CpuAdapterWeights final : AdapterWeights {
  // Indexed by ModuleId (BaseModules); nullopt where the module is not adapted. Linear modules:
  // a_RI [R, I], b_OR [O, R]. The embedding: a_RI is lora_embedding_A transposed to [V, R],
  // b_OR is [D, R] (see ops/embedding.h).
  std::vector<std::optional<ops::AdapterFactors>> modules;

  const ops::AdapterFactors* Find(int module_id) const {
    const auto& factors = modules[static_cast<size_t>(module_id)];
    return factors ? &*factors : nullptr;
  }
  int64_t bytes() const;  // of all tensors
};

// Returns a module's base weight and its cached ||W||². Implemented by model/; thread-safe.
class BaseWeightSource {
 public:
  virtual ~BaseWeightSource() = default;
  // Contiguous fp32 or bf16, [rows, cols] of the module.
  virtual at::Tensor Weight(int module_id) const = 0;
  // ops::BaseSquaredNorms along the module's norm axis (linear: rows, embedding: columns). Computed
  // at the first call for a module and kept.
  virtual at::Tensor SquaredNorms(int module_id) = 0;
  // The dtype the checkpoint stores the weight in; decides eps of MagnitudeScale.
  virtual at::ScalarType CheckpointDtype(int module_id) const = 0;
};

}  // namespace dorad::adapter
