// Copies of adapters' weights in host memory, from which they come back without reading, checking
// and norms: what the residency needs of a backend for its second tier. Torch-free.
// Owned by Backend, outlives the copies. Thread-safe; saving and restoring run on loader threads.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace dorad::adapter {

class AdapterWeights;

// One version's weights in host memory, which goes back with the object. Immutable.
class HostCopy {
 public:
  virtual ~HostCopy() = default;
};

class HostCopies {
 public:
  virtual ~HostCopies() = default;
  // Host memory for all copies. Residency counts before it saves, so that it suffices.
  virtual int64_t capacity_bytes() const = 0;
  // The part of it that a copy of weights of so many bytes takes.
  virtual int64_t BytesFor(int64_t weights_bytes) const = 0;
  // Both may fail as the device does. Restore: the same weights, to the last bit, perhaps at
  // another place; RESOURCE_EXHAUSTED (OUT_OF_MEMORY) when there is none for them.
  virtual absl::StatusOr<std::unique_ptr<const HostCopy>> Save(
      const std::shared_ptr<const AdapterWeights>& weights) = 0;
  virtual absl::StatusOr<std::shared_ptr<const AdapterWeights>> Restore(const HostCopy& copy) = 0;
};

}  // namespace dorad::adapter
