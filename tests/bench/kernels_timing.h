// How the kernels' benches measure: events around graph replays or launches, medians.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string_view>
#include <vector>

#include "kernels/isa/isa.h"

namespace dorad::bench {

inline void Check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

// "sm90" or "mma"; anything else: the device's best.
inline kernels::KernelIsa IsaOf(std::string_view name) {
  if (name == "sm90") return kernels::KernelIsa::kSm90;
  return name == "mma" ? kernels::KernelIsa::kMma : kernels::BestIsa();
}

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Microseconds of work() on the stream, as a graph or as launches: the median of `replays`, after
// two that do not count.
inline double Microseconds(cudaStream_t stream, int replays, bool as_graph,
                           const std::function<void()>& work) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (as_graph) {
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    Check(cudaStreamEndCapture(stream, &graph));
    Check(cudaGraphInstantiate(&executable, graph, 0));
  }
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {
    Check(cudaEventRecord(begin, stream));
    if (as_graph) {
      Check(cudaGraphLaunch(executable, stream));
    } else {
      work();
    }
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    float milliseconds;
    Check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= 2) times.push_back(1e3 * milliseconds);
  }
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  if (as_graph) {
    Check(cudaGraphExecDestroy(executable));
    Check(cudaGraphDestroy(graph));
  }
  return Median(times);
}

// Of one of `calls` calls work(0), work(1), … that are one graph.
inline double MicrosecondsEach(cudaStream_t stream, int calls,
                               const std::function<void(int)>& work) {
  return Microseconds(stream, 15, /*as_graph=*/true,
                      [&] {
                        for (int i = 0; i < calls; ++i) work(i);
                      }) /
         calls;
}

// TB/s, read and written, of a copy of `bytes`, which should be more than the L2 holds.
inline double CopyBandwidth(cudaStream_t stream, void* to, const void* from, size_t bytes) {
  const double microseconds = Microseconds(stream, 9, /*as_graph=*/false, [&] {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  });
  return 2e-6 * static_cast<double>(bytes) / microseconds;
}

}  // namespace dorad::bench
