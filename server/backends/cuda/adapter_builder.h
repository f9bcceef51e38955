// The CUDA backend's AdapterBuilder: copies the file's factors to the GPU and computes layout,
// rounding and norms there, a few modules at a time, while the next ones are copied.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/adapter/publish/builder.h"
#include "server/backends/cuda/background_launch_queue.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"
#include "server/backends/cuda/staging.h"

namespace dorad::cuda {

// model, gaps and ledger are borrowed and outlive the builder and its weights, which are
// CudaAdapterWeights. Takes tensors from any adapter::TensorPlace. Factors are rounded to bf16, and
// the norms are those of the rounded, served factors. Works on its own streams, the norms in
// `gaps`; builds one adapter at a time. Reserves kinds "adapters" and, while it works, "loading"
// before the copies.
absl::StatusOr<std::unique_ptr<adapter::AdapterBuilder>> MakeCudaAdapterBuilder(
    const CudaModel* model, BackgroundLaunchQueue* gaps, MemoryLedger* ledger,
    const Uploader::Options& upload = Uploader::DefaultOptions());

}  // namespace dorad::cuda
