#include "kernels/common/gelu.cuh"
#include "kernels/common/host.h"
#include "kernels/decoder/activation.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;

// kWidth neighbouring elements.
template <int kWidth>
struct Group {
  alignas(2 * kWidth) __nv_bfloat16 values[kWidth];
};

// The fast exponential and quotient are accurate to about 2^-20, far below bf16's 2^-9.
struct Silu {
  __device__ float operator()(float x) const { return __fdividef(x, 1.0f + __expf(-x)); }
};

// 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x³).
struct GeluTanh {
  __device__ float operator()(float x) const {
    constexpr float kLinear = -2.0f * 0.7978845608f;
    return __fdividef(x, 1.0f + __expf(x * (kLinear + kLinear * 0.044715f * x * x)));
  }
};

template <typename Activation, int kWidth>
__global__ void __launch_bounds__(kThreads)
    GatedKernel(const __nv_bfloat16* gate_up, int size, __nv_bfloat16* out) {
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
    y.values[j] = __float2bfloat16_rn(Activation()(__bfloat162float(gate.values[j])) *
                                      __bfloat162float(up.values[j]));
  }
  *reinterpret_cast<Group<kWidth>*>(out + row * size + i) = y;
}

template <typename Activation>
cudaError_t Gated(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                  cudaStream_t stream) {
  if (rows <= 0 || rows > 65535 || size <= 0 || !IsAligned(gate_up) || !IsAligned(out)) {
    return cudaErrorInvalidValue;
  }
  const int width = size % 8 == 0 ? 8 : 1;
  const auto kernel = width == 8 ? GatedKernel<Activation, 8> : GatedKernel<Activation, 1>;
  const dim3 grid((size / width + kThreads - 1) / kThreads, rows);
  return LaunchEarly(kernel, grid, kThreads, 0, stream, gate_up, size, out);
}

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    GateHeadsKernel(const __nv_bfloat16* qkv, int64_t pitch, int heads, int head_dim,
                    __nv_bfloat16* values) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t row = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * kWidth;
  if (i >= heads * head_dim) return;
  const int head = i / head_dim;
  const auto gate = *reinterpret_cast<const Group<kWidth>*>(
      qkv + row * pitch + (2 * head + 1) * head_dim + i % head_dim);
  auto& at = *reinterpret_cast<Group<kWidth>*>(values + row * heads * head_dim + i);
  Group<kWidth> y = at;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    y.values[j] = __float2bfloat16_rn(__fdividef(__bfloat162float(y.values[j]),
                                                 1.0f + __expf(-__bfloat162float(gate.values[j]))));
  }
  at = y;
}

}  // namespace

cudaError_t GateHeads(const __nv_bfloat16* qkv, int64_t pitch, int32_t rows, int32_t heads,
                      int32_t head_dim, __nv_bfloat16* values, cudaStream_t stream) {
  if (rows <= 0 || rows > 65535 || heads <= 0 || head_dim <= 0 || !IsAligned(qkv) ||
      !IsAligned(values)) {
    return cudaErrorInvalidValue;
  }
  const int width = head_dim % 8 == 0 && pitch % 8 == 0 ? 8 : 1;
  const auto kernel = width == 8 ? GateHeadsKernel<8> : GateHeadsKernel<1>;
  const dim3 grid((heads * head_dim / width + kThreads - 1) / kThreads, rows);
  return LaunchEarly(kernel, grid, kThreads, 0, stream, qkv, pitch, heads, head_dim, values);
}

cudaError_t SiluMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream) {
  return Gated<Silu>(gate_up, rows, size, out, stream);
}

cudaError_t GeluTanhMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size,
                        __nv_bfloat16* out, cudaStream_t stream) {
  return Gated<GeluTanh>(gate_up, rows, size, out, stream);
}

cudaError_t GeluMul(const __nv_bfloat16* gate_up, int32_t rows, int32_t size, __nv_bfloat16* out,
                    cudaStream_t stream) {
  return Gated<ExactGelu>(gate_up, rows, size, out, stream);
}

}  // namespace dorad::kernels
