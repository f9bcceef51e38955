#include "server/backends/cuda/decode_graphs.h"

#include <utility>

#include "server/backends/cuda/decode_batch.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kCapture[] = "capturing decode graphs";

absl::StatusOr<cudaGraphExec_t> CaptureOne(const Stream& stream, int size, bool adapted,
                                           DecodeGraphs::LaunchStep launch) {
  DORAD_RETURN_IF_ERROR(launch(size, adapted));
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kCapture));
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                             kCapture);
  const absl::Status launched = launch(size, adapted);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.get(), &graph);
  DORAD_RETURN_IF_ERROR(launched);
  DORAD_RETURN_IF_CUDA_ERROR(ended, kCapture);
  cudaGraphExec_t executable = nullptr;
  const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  DORAD_RETURN_IF_CUDA_ERROR(made, kCapture);
  return executable;
}

}  // namespace

absl::StatusOr<DecodeGraphs> DecodeGraphs::Capture(const Stream& stream, LaunchStep launch,
                                                   absl::FunctionRef<absl::Status()> captured) {
  DecodeGraphs graphs;
  for (auto size = DecodeBatch::kSizes.rbegin(); size != DecodeBatch::kSizes.rend(); ++size) {
    for (const bool adapted : {true, false}) {
      DORAD_ASSIGN_OR_RETURN((graphs.graphs_[{*size, adapted}]),
                             CaptureOne(stream, *size, adapted, launch));
      DORAD_RETURN_IF_ERROR(captured());
    }
  }
  return graphs;
}

DecodeGraphs::~DecodeGraphs() {
  for (const auto& [kind, graph] : graphs_) {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
}

absl::Status DecodeGraphs::Launch(int size, bool adapted, const Stream& stream) const {
  return ToStatus(cudaGraphLaunch(graphs_.at({size, adapted}), stream.get()), "the step");
}

}  // namespace dorad::cuda
