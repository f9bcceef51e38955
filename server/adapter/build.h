// From validated tensors to serving layout: copies, row norms, g. Torch stays in the .cc file.
// Functions are thread-safe; they run on loader threads.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/adapter/base_modules.h"
#include "server/adapter/tensors.h"

namespace dorad::adapter {

class BaseWeightSource;
struct AdapterWeights;

struct BuildOptions {
  int64_t norm_chunk_budget_bytes = 64 << 20;
  bool factors_bf16 = false;
};

struct BuiltAdapter {
  std::shared_ptr<const AdapterWeights> weights;
  int64_t bytes = 0;
  absl::Duration copy, norms;
};

// INVALID_ARGUMENT listing every violation: ADAPTER_NORM_DEGENERATE, ADAPTER_NOT_FINITE (a value
// beyond bf16's range when factors are rounded to it). May throw what torch throws.
absl::StatusOr<BuiltAdapter> BuildWeights(const AdapterTensors& tensors, const BaseModules& modules,
                                          BaseWeightSource& base, const BuildOptions& options);

// INVALID_ARGUMENT (ADAPTER_BASE_DIFFERS) unless each copy equals the base model's weight.
absl::Status CheckBaseCopies(const AdapterTensors& tensors, const BaseModules& modules,
                             const BaseWeightSource& base);

// Makes parallel regions that the calling thread opens run on that thread alone, for good: a load
// must not take the cores that running streams use. Does not touch other threads.
void ConfineToCallingThread();

}  // namespace dorad::adapter
