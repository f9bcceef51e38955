// The CUDA backend's HostCopies: adapters' memory, copied to pinned host memory as it is. What
// comes back goes straight to where it is served: no layout, no rounding, no norms.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/residency/host_copies.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"

namespace dorad::cuda {

// Pins so much host memory. model and ledger are borrowed and outlive the copies and the restored
// weights, which are CudaAdapterWeights of the ledger's kind "adapters". Saves and
// restores at the same time, one of each.
absl::StatusOr<std::unique_ptr<adapter::HostCopies>> MakeCudaHostCopies(const CudaModel* model,
                                                                        int64_t capacity_bytes,
                                                                        MemoryLedger* ledger);

}  // namespace dorad::cuda
