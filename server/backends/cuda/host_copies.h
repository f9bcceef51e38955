// The CUDA backend's HostCopies: device memory of adapters, copied to pinned host memory. A restore
// is a plain copy to device memory: no layout, no rounding, no norms.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/residency/host_copies.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"

namespace dorad::cuda {

// Pins `bytes` of host memory. model and ledger are borrowed and outlive the copies and the
// restored weights, which are CudaAdapterWeights of the ledger's kind "adapters". One save and one
// restore may run at the same time.
absl::StatusOr<std::unique_ptr<adapter::HostCopies>> MakeCudaHostCopies(const CudaModel* model,
                                                                        int64_t capacity_bytes,
                                                                        MemoryLedger* ledger);

}  // namespace dorad::cuda
