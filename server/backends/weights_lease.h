// The base model's weights while they are lent to a process: what it maps stays where it is.
//
// Held by the connection that asked for it; ending it may wait for whoever uses the weights.
// Thread-safe.
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

  // Descriptors, for reading only where the memory is the host's, of the memory's pieces from
  // `first` on, at most `max`; none after the last piece. The device's statuses, UNAVAILABLE
  // (DESCRIPTORS_EXHAUSTED).
  virtual absl::StatusOr<std::vector<UniqueFd>> Share(size_t first, size_t max) const = 0;
};

}  // namespace dorad::shared_memory
