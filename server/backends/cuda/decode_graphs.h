// Decode steps as CUDA graphs: two for each size of DecodeBatch, with and without kernels for
// adapters, captured at start, largest first. A launch costs one call instead of hundreds. Graphs
// read adapters through the table on the device, so they stay valid when adapters change. Confined
// to the engine thread.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class DecodeGraphs {
 public:
  using LaunchStep = absl::FunctionRef<absl::Status(int size, bool adapted)>;

  // `launch` enqueues a step of a size on the stream. It runs twice for each graph: once for real,
  // because libraries initialise at their first use, and once for the capture. `captured` runs
  // after each graph.
  static absl::StatusOr<DecodeGraphs> Capture(const Stream& stream, LaunchStep launch,
                                              absl::FunctionRef<absl::Status()> captured);
  DecodeGraphs(DecodeGraphs&& other) noexcept : graphs_(std::move(other.graphs_)) {
    other.graphs_.clear();
  }
  ~DecodeGraphs();

  // adapted: some row of the step has an adapter.
  absl::Status Launch(int size, bool adapted, const Stream& stream) const;

 private:
  DecodeGraphs() = default;

  std::map<std::pair<int, bool>, cudaGraphExec_t> graphs_;  // by size and `adapted`
};

}  // namespace dorad::cuda
