#include "kernels/common/barrier.cuh"
#include "kernels/common/host.h"
#include "kernels/common/launch.h"
#include "kernels/decoder/activation.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

// kWidth neighbouring elements.
template <int kWidth>
struct Group {
  alignas(2 * kWidth) __nv_bfloat16 values[kWidth];
};

// The fast exponential and quotient are accurate to about 2^-20, far below bf16's 2^-9.
__device__ float Silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    SiluMulKernel(const __nv_bfloat16* gate_up, int size, __nv_bfloat16* out) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t row = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * kWidth;
  if (i >= size) return;
  const auto gate = *reinterpret_cast<const Group<kWidth>*>(gate_up + row * 2 * size + i);
  const auto up = *reinterpret_cast<const Group<kWidth>*>(gate_up + row * 2 * size + size + i);
  Group<kWidth> y;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y.values[j] = __float2bfloat16_rn(Silu(__bfloat162float(gate.values[j])) *
                                      __bfloat162float(up.values[j]));
  }
  *reinterpret_cast<Group<kWidth>*>(out + row * size + i) = y;
}

template <int kWidth>
cudaError_t Launch(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                   cudaStream_t stream) {
  const dim3 grid((size / kWidth + kThreads - 1) / kThreads, rows);
  return LaunchEarly(SiluMulKernel<kWidth>, grid, kThreads, 0, stream, gate_up, size, out);
}

}  // namespace

cudaError_t SiluMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream) {
  if (rows <= 0 || rows > 65535 || size <= 0 || !IsAligned(gate_up) || !IsAligned(out)) {
    return cudaErrorInvalidValue;
  }
  return size % 8 == 0 ? Launch<8>(gate_up, rows, size, out, stream)
                       : Launch<1>(gate_up, rows, size, out, stream);
}

}  // namespace dorad::kernels
