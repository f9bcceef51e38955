// The CUDA backend of ModelRunner. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "server/backends/cuda/background_launch_queue.h"
#include "server/backends/cuda/device.h"
#include "server/backends/cuda/model.h"
#include "server/engine/model_runner.h"

namespace dorad::cuda {

struct RunnerOptions {
  int64_t kv_pages = 0;
  int64_t max_positions = 0;              // the longest sequence that will be run
  int64_t max_rows = 0;                   // of one step
  int64_t max_sequences = 0;              // of one step; each may have an adapter of its own
  BackgroundLaunchQueue* gaps = nullptr;  // notified of every step; borrowed, may be nullptr
  Priority priority = Priority::kHigh;    // of steps
};

// model and ledger are borrowed and outlive the runner. Allocates the KV cache and the workspace,
// and accounts for graphs and libraries: OUT_OF_MEMORY names the memory that did not fit.
absl::StatusOr<std::unique_ptr<engine::ModelRunner>> MakeCudaModelRunner(
    const CudaModel* model, const RunnerOptions& options, MemoryLedger* ledger);

}  // namespace dorad::cuda
