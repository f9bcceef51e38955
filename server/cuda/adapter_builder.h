// The CUDA backend's AdapterBuilder: factors through pinned buffers, norms on the GPU.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/builder.h"
#include "server/cuda/device.h"
#include "server/cuda/model.h"

namespace dorad::cuda {

// model and ledger are borrowed and outlive the builder and its weights, which are
// CudaAdapterWeights. Factors are rounded to bf16, and the norms are those of the rounded factors:
// of what is served. Works on a stream of its own, beside the decoder's; builds one adapter at a
// time. Kinds "adapters" and, while it works, "loading".
absl::StatusOr<std::unique_ptr<adapter::AdapterBuilder>> MakeCudaAdapterBuilder(
    const CudaModel* model, MemoryLedger* ledger);

}  // namespace dorad::cuda
