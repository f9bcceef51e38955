#include "server/backends/cuda/decode_graphs.h"

#include <utility>

#include "server/backends/cuda/decode_batch.h"
#include "server/platform/error.h"

namespace dorad::cuda {
namespace {

constexpr char kCapture[] = "capturing decode graphs";

absl::StatusOr<cudaGraphExec_t> CaptureOne(const Stream& stream, const DecodeGraphs::Kind& kind,
                                           DecodeGraphs::LaunchStep launch) {
  DORAD_RETURN_IF_ERROR(launch(kind));
  DORAD_RETURN_IF_ERROR(stream.Synchronize(kCapture));
  DORAD_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                             kCapture);
  const absl::Status launched = launch(kind);
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

absl::StatusOr<DecodeGraphs> DecodeGraphs::Capture(const Stream& stream, bool with_guesses,
                                                   LaunchStep launch,
                                                   absl::FunctionRef<absl::Status()> captured) {
  DecodeGraphs graphs;
  for (auto size = DecodeBatch::kSizes.rbegin(); size != DecodeBatch::kSizes.rend(); ++size) {
    for (const Kind& kind : {Kind{*size, true, true}, Kind{*size, true, false},
                             Kind{*size, false, true}, Kind{*size, false, false}}) {
      if (kind.guesses && !with_guesses) continue;
      DORAD_ASSIGN_OR_RETURN(graphs.graphs_[kind], CaptureOne(stream, kind, launch));
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

absl::Status DecodeGraphs::Launch(const Kind& kind, const Stream& stream) const {
  return ToStatus(cudaGraphLaunch(graphs_.at(kind), stream.get()), "the step");
}

}  // namespace dorad::cuda
