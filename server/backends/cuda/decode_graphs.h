// Decode steps as CUDA graphs: for each size of DecodeBatch with and without kernels for adapters,
// of single rows and of guesses, captured at start, largest first. A launch costs one call instead
// of hundreds. Graphs read adapters through the table on the device, so they stay valid when
// adapters change. Confined to the engine thread.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <map>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/backends/cuda/device.h"

namespace dorad::cuda {

class DecodeGraphs {
 public:
  struct Kind {
    int size = 0;
    bool adapted = false;  // some row has an adapter
    bool guesses = false;  // some sequence has more than one row
    auto operator<=>(const Kind&) const = default;
  };
  using LaunchStep = absl::FunctionRef<absl::Status(const Kind& kind)>;

  // `launch` enqueues a step of a kind on the stream. It runs twice for each graph: once for real,
  // because libraries initialise at their first use, and once for the capture. `captured` runs
  // after each graph.
  // with_guesses: kinds with guesses, too.
  static absl::StatusOr<DecodeGraphs> Capture(const Stream& stream, bool with_guesses,
                                              LaunchStep launch,
                                              absl::FunctionRef<absl::Status()> captured);
  DecodeGraphs(DecodeGraphs&& other) noexcept : graphs_(std::move(other.graphs_)) {
    other.graphs_.clear();
  }
  ~DecodeGraphs();

  // REQUIRES: the kind was captured.
  absl::Status Launch(const Kind& kind, const Stream& stream) const;

 private:
  DecodeGraphs() = default;

  std::map<Kind, cudaGraphExec_t> graphs_;
};

}  // namespace dorad::cuda
