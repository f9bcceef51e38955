#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"
#include "kernels/sampling/in_block.cuh"
#include "kernels/sampling/sample.cuh"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 512;

// Each block takes one row after the other.
template <typename A>
__global__ void __launch_bounds__(kThreads, 1)
    SampleRowsKernel(const __grid_constant__ Launch p, int rows, float* workspace, size_t part) {
  WaitForPrevious();
  if (p.rows_in_use != nullptr) rows = min(rows, *p.rows_in_use);
  for (int index = static_cast<int>(blockIdx.x); index < rows;
       index += static_cast<int>(gridDim.x)) {
    SampleRow<InBlock, A>(p, index, {workspace + blockIdx.x * part});
    __syncthreads();  // the next row has the same memory
  }
}

// Of one launch: a block fills a multiprocessor.
cudaError_t BlocksFor(int rows, int* blocks) {
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(blocks));
  *blocks = std::min(*blocks, rows);
  return cudaSuccess;
}

template <typename A>
cudaError_t Run(const Launch& p, int rows, void* workspace, cudaStream_t stream) {
  int blocks = 0;
  DORAD_CUDA_RETURN_IF_ERROR(BlocksFor(rows, &blocks));
  return LaunchEarly(SampleRowsKernel<A>, blocks, kThreads, sizeof(RowShared<InBlock>), stream, p,
                     rows, static_cast<float*>(workspace),
                     InBlock::LogitsSize(ChunksOf(p.vocabulary)));
}

}  // namespace

cudaError_t MmaBytes(int rows, int vocabulary, size_t* bytes) {
  int blocks = 0;
  DORAD_CUDA_RETURN_IF_ERROR(BlocksFor(rows, &blocks));
  *bytes = sizeof(float) * InBlock::LogitsSize(ChunksOf(vocabulary)) * static_cast<size_t>(blocks);
  return cudaSuccess;
}

cudaError_t SampleMma(const Launch& p, int rows, bool adjusts, void* workspace,
                      cudaStream_t stream) {
  return adjusts ? Run<Adjuster>(p, rows, workspace, stream)
                 : Run<Unadjusted>(p, rows, workspace, stream);
}

}  // namespace dorad::kernels
