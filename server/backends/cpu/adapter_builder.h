// The CPU backend's AdapterBuilder: tensors in memory, norms with ops/. Torch stays in the .cc
// file.
#pragma once

#include <cstdint>
#include <memory>

#include "server/adapter/peft/base_modules.h"
#include "server/adapter/publish/builder.h"

namespace dorad::adapter {

class BaseWeightSource;

struct CpuBuilderOptions {
  int64_t norm_chunk_budget_bytes = 64 << 20;
  // Round fp32 factors to bf16 (bf16 compute), or keep the file's dtype.
  bool factors_bf16 = false;
};

// modules and base are borrowed and outlive the builder. Its weights are CpuAdapterWeights.
std::unique_ptr<AdapterBuilder> MakeCpuAdapterBuilder(const BaseModules* modules,
                                                      BaseWeightSource* base,
                                                      CpuBuilderOptions options);

}  // namespace dorad::adapter
