#include "kernels/decoder/activation.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void SiluMulKernel(const float* gate_up, int size, __nv_bfloat16* out) {
  const int64_t row = blockIdx.y;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= size) return;
  const float gate = gate_up[row * 2 * size + i];
  const float up = gate_up[row * 2 * size + size + i];
  out[row * size + i] = __float2bfloat16_rn(gate / (1.0f + expf(-gate)) * up);
}

}  // namespace

cudaError_t SiluMul(const float* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream) {
  if (rows <= 0 || rows > 65535 || size <= 0) return cudaErrorInvalidValue;
  const dim3 grid((size + kThreads - 1) / kThreads, rows);
  SiluMulKernel<<<grid, kThreads, 0, stream>>>(gate_up, size, out);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
