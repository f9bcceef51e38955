#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/sampling/in_cluster.cuh"
#include "kernels/sampling/sample.cuh"

namespace dorad::kernels {
namespace {

template <int kThreads, int kBlocks, typename A>
__global__ void __cluster_dims__(InCluster::kBlocks, 1, 1) __launch_bounds__(kThreads, kBlocks)
    SampleKernel(const __grid_constant__ Launch p) {
  const int index = static_cast<int>(blockIdx.x) / InCluster::kBlocks;
  if (p.rows_in_use != nullptr && index >= *p.rows_in_use) return;  // a whole cluster
  SampleRow<InCluster, A>(p, index, {});
}

template <int kThreads, int kBlocks, typename A>
cudaError_t Start(const Launch& p, int rows, int threads, size_t bytes, cudaStream_t stream) {
  const auto kernel = SampleKernel<kThreads, kBlocks, A>;
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<rows * InCluster::kBlocks, threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename A>
cudaError_t Run(const Launch& p, int rows, cudaStream_t stream) {
  const int share = (ChunksOf(p.vocabulary) + InCluster::kBlocks - 1) / InCluster::kBlocks;
  const int threads = std::clamp(share * kWarp, kScanThreads, 1024);
  const size_t bytes = InCluster::SharedBytes(share);
  // Two blocks of an SM at a time where they fit.
  if (threads <= 640) return Start<640, 2, A>(p, rows, threads, bytes, stream);
  return Start<1024, 1, A>(p, rows, threads, bytes, stream);
}

}  // namespace

cudaError_t SampleSm90(const Launch& p, int rows, bool adjusts, cudaStream_t stream) {
  return adjusts ? Run<Adjuster>(p, rows, stream) : Run<Unadjusted>(p, rows, stream);
}

}  // namespace dorad::kernels
