// A process's lease on the base model's weights: their memory stays in place while it maps them.
//
// Held by the connection that requested it; its end may wait for uses of the weights. Thread-safe.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "server/platform/net/unique_fd.h"

namespace dorad::shared_memory {

class WeightsLease {
 public:
  // Ends the lease.
  virtual ~WeightsLease() = default;

  // Descriptors of the memory's pieces from `first` on, at most `max`; read-only for host memory;
  // none after the last piece. The device's statuses, UNAVAILABLE (DESCRIPTORS_EXHAUSTED).
  virtual absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const = 0;
};

}  // namespace dorad::shared_memory
