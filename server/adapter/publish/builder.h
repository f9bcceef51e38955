// Builds a backend's serving layout from validated tensors: the loader's interface to a backend.
// Torch-free. Implemented by each backend in its adapter_builder.h. Thread-safe; runs on loader
// threads.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/adapter/peft/base_modules.h"
#include "server/adapter/peft/device_tensors.h"
#include "server/adapter/peft/peer_tensors.h"
#include "server/adapter/peft/tensors.h"
#include "server/adapter/peft/violations.h"
#include "server/adapter/residency/adapter_weights.h"

namespace dorad::adapter {

struct BuiltAdapter {
  std::shared_ptr<const AdapterWeights> weights;
  int64_t bytes = 0;
  // If the two overlap: copy ends with the last tensor's copy, and norms is the rest.
  absl::Duration copy, norms;
};

class AdapterBuilder {
 public:
  // modules: of the base model; borrowed.
  explicit AdapterBuilder(const BaseModules* modules) : modules_(*modules) {}
  virtual ~AdapterBuilder() = default;
  // Call once on each thread that calls the functions below.
  virtual void PrepareThread() {}
  // INVALID_ARGUMENT (ADAPTER_BASE_DIFFERS) unless each copy of a base weight in the file equals
  // the base model's.
  absl::Status CheckBaseCopies(const AdapterTensors& tensors) const;
  // Copies tensors that lie on the builder's GPU to memory of its own there. RESOURCE_EXHAUSTED
  // (OUT_OF_MEMORY). REQUIRES: LiesOnDevice(peer).
  virtual absl::StatusOr<std::unique_ptr<DeviceTensors>> CopyOnDevice(const PeerTensors& peer);
  // Copies, row norms (paper, Algorithm 1) and g. INVALID_ARGUMENT listing every violation:
  // ADAPTER_NORM_DEGENERATE, ADAPTER_NOT_FINITE (a value beyond bf16's range when factors are
  // rounded to it). May throw the exceptions of the backend's libraries.
  virtual absl::StatusOr<BuiltAdapter> Build(const AdapterTensors& tensors) = 0;

 protected:
  // Compares after the roundings between the trainer's copy and the server's: the file may be
  // narrower than the server's weight, or the server's weight narrower than the checkpoint and the
  // file.
  virtual absl::StatusOr<bool> EqualsBase(const BaseCopy& copy) const = 0;

  const BaseModules& modules_;
};

// Reports rows whose norm does not define g = m / max(norm, eps) as ADAPTER_NORM_DEGENERATE. A zero
// row has no direction, so a magnitude on it means nothing (PEFT gives NaN or infinity). Zero on
// zero is harmless: padded vocabularies have such rows. Equal sizes.
void CheckNorms(const BaseModule& module, absl::Span<const float> magnitude,
                absl::Span<const float> norms, absl::Span<const float> g, double eps,
                Violations* violations);

}  // namespace dorad::adapter
