#include "kernels/common/status.h"
#include "kernels/decoder/rms_norm.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The sum over the block, in every thread; the order of additions is fixed.
__device__ float BlockSum(float value) {
  __shared__ float warps[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, offset);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += warps[i];
  return sum;
}

// One block a row. Each thread comes back to its own elements only, so the second pass needs no
// barrier beyond the sum's.
__global__ void AddRmsNormKernel(const AddRmsNormParams p) {
  const int64_t row = blockIdx.x;
  float* residual = p.residual + (p.gather == nullptr ? row : p.gather[row]) * p.size;
  const float* delta = p.delta == nullptr ? nullptr : p.delta + row * p.size;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    float x = residual[i];
    if (delta != nullptr) {
      x += delta[i];
      residual[i] = x;
    }
    squares += x * x;
  }
  const float scale = rsqrtf(BlockSum(squares) / static_cast<float>(p.size) + p.eps);
  __nv_bfloat16* out = p.out + row * p.size;
  for (int i = threadIdx.x; i < p.size; i += kThreads) {
    out[i] = __float2bfloat16_rn(residual[i] * scale * p.weight[i]);
  }
}

}  // namespace

cudaError_t AddRmsNorm(const AddRmsNormParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.size <= 0) return cudaErrorInvalidValue;
  if (params.gather != nullptr && params.delta != nullptr) return cudaErrorInvalidValue;
  AddRmsNormKernel<<<params.rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
