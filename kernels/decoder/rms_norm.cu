#include <algorithm>
#include <cstdint>

#include "kernels/common/host.h"
#include "kernels/common/warp.cuh"
#include "kernels/decoder/rms_norm.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kMaxThreads = 1024;

// kWidth neighbouring elements.
template <int kWidth>
struct Group {
  alignas(4 * kWidth) float values[kWidth];
};
template <int kWidth>
struct RoundedGroup {
  alignas(2 * kWidth) __nv_bfloat16 values[kWidth];
};

// The sum over the block, in every thread; the order of additions is fixed.
__device__ float BlockSum(float value) {
  __shared__ float warps[kMaxThreads / 32];
  value = WarpSum(value);
  const int lane = threadIdx.x % 32;
  if (lane == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  return WarpSum(lane < blockDim.x / 32 ? warps[lane] : 0.0f);
}

// One block a row, held in registers: kEach groups a thread. The distribution over threads depends
// on the row's size alone, so its sum is the same in every batch.
template <int kWidth, int kEach, bool kNormsDelta>
__global__ void __launch_bounds__(kMaxThreads) AddRmsNormKernel(const AddRmsNormParams p) {
  using Elements = Group<kWidth>;
  const int groups = p.size / kWidth;
  Elements weight[kEach], delta_weight[kEach], x[kEach], delta[kEach];
  LaunchDependents();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= groups) continue;
    weight[i] = reinterpret_cast<const Elements*>(p.weight)[at];
    if (kNormsDelta) delta_weight[i] = reinterpret_cast<const Elements*>(p.delta_weight)[at];
  }
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  auto* const residual = reinterpret_cast<Elements*>(
      p.residual + (p.gather == nullptr ? row : p.gather[row]) * p.size);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i] = delta[i] = {};
    if (at >= groups) continue;
    x[i] = residual[at];
    if (p.delta != nullptr) {
      delta[i] = reinterpret_cast<const Elements*>(p.delta + row * p.size)[at];
    }
  }
  if constexpr (kNormsDelta) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) squares += delta[i].values[j] * delta[i].values[j];
    }
    const float scale = rsqrtf(BlockSum(squares) / static_cast<float>(p.size) + p.eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (threadIdx.x + i * blockDim.x >= groups) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        delta[i].values[j] = delta[i].values[j] * scale * delta_weight[i].values[j];
      }
    }
    __syncthreads();  // BlockSum's memory is used again
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      x[i].values[j] += delta[i].values[j];
      squares += x[i].values[j] * x[i].values[j];
    }
    if (at < groups && p.delta != nullptr) residual[at] = x[i];
  }
  const float scale = rsqrtf(BlockSum(squares) / static_cast<float>(p.size) + p.eps);
  auto* const out = reinterpret_cast<RoundedGroup<kWidth>*>(p.out + row * p.size);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= groups) continue;
    RoundedGroup<kWidth> rounded;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      rounded.values[j] = __float2bfloat16_rn(x[i].values[j] * scale * weight[i].values[j]);
    }
    out[at] = rounded;
  }
}

template <int kWidth, bool kNormsDelta>
cudaError_t Launch(const AddRmsNormParams& params, cudaStream_t stream) {
  constexpr int kFew = 2, kMany = 4;
  const int groups = params.size / kWidth;
  const bool is_long = groups > kFew * kMaxThreads;
  const int each = is_long ? kMany : kFew;
  const int threads = ((groups + each - 1) / each + 31) / 32 * 32;
  if (threads > kMaxThreads) return cudaErrorInvalidValue;
  return LaunchEarly(is_long ? AddRmsNormKernel<kWidth, kMany, kNormsDelta>
                             : AddRmsNormKernel<kWidth, kFew, kNormsDelta>,
                     params.rows, threads, 0, stream, params);
}

}  // namespace

cudaError_t AddRmsNorm(const AddRmsNormParams& params, cudaStream_t stream) {
  if (params.rows <= 0 || params.size <= 0) return cudaErrorInvalidValue;
  if (params.gather != nullptr && params.delta != nullptr) return cudaErrorInvalidValue;
  const bool norms_delta = params.delta_weight != nullptr;
  if (norms_delta && params.delta == nullptr) return cudaErrorInvalidValue;
  if (!IsAligned(params.residual) || !IsAligned(params.delta) || !IsAligned(params.weight) ||
      !IsAligned(params.delta_weight) || !IsAligned(params.out)) {
    return cudaErrorInvalidValue;
  }
  const auto launch = params.size % 4 == 0 ? (norms_delta ? Launch<4, true> : Launch<4, false>)
                                           : (norms_delta ? Launch<1, true> : Launch<1, false>);
  return launch(params, stream);
}

}  // namespace dorad::kernels
