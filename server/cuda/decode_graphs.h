// Decode steps as CUDA graphs: one for each size of DecodeBatch, captured at start, largest first.
// A launch costs one call instead of hundreds. Adapters are reached through the table on the
// device, so graphs survive their coming and going.
// Confined to the engine thread.
#pragma once

#include <cuda_runtime_api.h>

#include <map>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/cuda/device.h"

namespace dorad::cuda {

class DecodeGraphs {
 public:
  // `launch` enqueues a step of a size on the stream. It runs twice for each size: once for real,
  // because libraries set themselves up at the first use, and once while the stream records.
  static absl::StatusOr<DecodeGraphs> Capture(const Stream& stream,
                                              absl::FunctionRef<absl::Status(int size)> launch);
  DecodeGraphs(DecodeGraphs&& other) noexcept : graphs_(std::move(other.graphs_)) {
    other.graphs_.clear();
  }
  ~DecodeGraphs();

  absl::Status Launch(int size, const Stream& stream) const;

 private:
  DecodeGraphs() = default;

  std::map<int, cudaGraphExec_t> graphs_;
};

}  // namespace dorad::cuda
