#include "kernels/common/host.h"
#include "kernels/common/warp.cuh"
#include "kernels/vision/layer_norm.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxSize = 8192;  // in 32 KB of shared memory

// Of all threads of the block, in a fixed order; every thread gets it.
__device__ float SumOfBlock(float x, float* partial) {
  x = WarpSum(x);
  __syncthreads();  // after the last call's reads
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  return sum;
}

// One block a row.
__global__ void __launch_bounds__(kThreads) AddLayerNormKernel(const AddLayerNormParams p) {
  extern __shared__ float row[];
  __shared__ float partial[kWarps];
  const int64_t first = int64_t{blockIdx.x} * p.size;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    float x = p.residual[first + i];
    if (p.delta != nullptr) {
      x += p.delta[first + i];
      p.residual[first + i] = x;
    }
    row[i] = x;
    sum += x;
  }
  const float mean = SumOfBlock(sum, partial) / static_cast<float>(p.size);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    squares += (row[i] - mean) * (row[i] - mean);
  }
  const float variance = SumOfBlock(squares, partial) / static_cast<float>(p.size);
  const float scale = rsqrtf(variance + p.eps);
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    p.out[first + i] = __float2bfloat16_rn((row[i] - mean) * scale * p.weight[i] + p.bias[i]);
  }
}

}  // namespace

cudaError_t AddLayerNorm(const AddLayerNormParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.size <= 0 || params.size > kMaxSize ||
      params.residual == nullptr || params.weight == nullptr || params.bias == nullptr ||
      params.out == nullptr) {
    return cudaErrorInvalidValue;
  }
  AddLayerNormKernel<<<params.rows, kThreads, params.size * sizeof(float), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
