#include <algorithm>

#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/sampling/in_cluster.cuh"
#include "kernels/sampling/sample.cuh"

namespace dorad::kernels {
namespace {

template <int kThreads, int kBlocks, typename A>
__global__ void __launch_bounds__(kThreads, kBlocks)
    SampleKernel(const __grid_constant__ Launch p) {
  WaitForPrevious();
  const int index = static_cast<int>(blockIdx.x) / InCluster::kBlocks;
  if (p.rows_in_use != nullptr && index >= *p.rows_in_use) return;  // a whole cluster
  SampleRow<InCluster, A>(p, index, {});
}

template <typename A>
cudaError_t Run(const Launch& p, int rows, cudaStream_t stream) {
  const int share = (ChunksOf(p.vocabulary) + InCluster::kBlocks - 1) / InCluster::kBlocks;
  const int threads = std::clamp(share * kWarp, kScanThreads, 1024);
  const size_t bytes = InCluster::SharedBytes(share);
  // Two blocks of an SM at a time where they fit.
  const auto kernel = threads <= 640 ? SampleKernel<640, 2, A> : SampleKernel<1024, 1, A>;
  return LaunchEarlyInClusters(kernel, InCluster::kBlocks, rows * InCluster::kBlocks, threads,
                               bytes, stream, p);
}

}  // namespace

cudaError_t SampleSm90(const Launch& p, int rows, bool adjusts, cudaStream_t stream) {
  return adjusts ? Run<Adjuster>(p, rows, stream) : Run<Unadjusted>(p, rows, stream);
}

}  // namespace dorad::kernels
