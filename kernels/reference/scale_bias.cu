#include "kernels/reference/scale_bias.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void ScaleBiasKernel(float* y, int64_t ld, int cols, const float* g, const float* bias) {
  const int col = blockIdx.x * kThreads + threadIdx.x;
  if (col >= cols) return;
  float* at = y + int64_t{blockIdx.y} * ld + col;
  float value = *at;
  if (g != nullptr) value *= g[col];
  if (bias != nullptr) value += bias[col];
  *at = value;
}

}  // namespace

cudaError_t ScaleBias(float* y, int64_t ld, int32_t rows, int32_t cols, const float* g,
                      const float* bias, cudaStream_t stream) {
  if (rows <= 0 || rows > 65535 || cols <= 0) return cudaErrorInvalidValue;
  if (g == nullptr && bias == nullptr) return cudaSuccess;
  const dim3 grid((cols + kThreads - 1) / kThreads, rows);
  ScaleBiasKernel<<<grid, kThreads, 0, stream>>>(y, ld, cols, g, bias);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
