#include <algorithm>
#include <limits>

#include "kernels/dora/norm.h"
#include "kernels/dora/norm_row.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, int size>
struct alignas(sizeof(T) * size) Vector {
  T values[size];
};

// One row a warp. Each lane has eight sums or more: short chains, and few terms a sum. They are
// added in double, so that the result's error stays near one fp32 rounding.
template <typename T, int size>
__global__ void __launch_bounds__(kThreads)
    SquaredRowNormsKernel(const T* __restrict__ w, int64_t rows, int64_t columns,
                          float* __restrict__ out) {
  using V = Vector<T, size>;
  constexpr int kBatch = 8;  // loads in flight a lane
  constexpr int kSums = 8;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const V* const vectors = reinterpret_cast<const V*>(w + row * columns);
  const int64_t count = columns / size;
  float sums[kSums] = {};
  int64_t i = lane;
  for (; i + (kBatch - 1) * kWarp < count; i += kBatch * kWarp) {
    V batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = vectors[i + k * kWarp];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const float x = ToFloat(batch[k].values[j]);
        float& sum = sums[(k * size + j) % kSums];
        sum = fmaf(x, x, sum);
      }
    }
  }
  for (; i < count; i += kWarp) {
    const V v = vectors[i];
#pragma unroll
    for (int j = 0; j < size; ++j) {
      const float x = ToFloat(v.values[j]);
      sums[j] = fmaf(x, x, sums[j]);
    }
  }
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < kSums; ++j) sum += static_cast<double>(sums[j]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
  }
  if (lane == 0) out[row] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(kThreads)
    AssembleNormsKernel(const float* base_sq, const float* cross, const float* ba_sq, float* norm,
                        int64_t size, float two_s, float s2, bool adapted) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  float squared = base_sq[i];
  if (adapted) squared = AssembledSquare(squared, two_s, cross[i], s2, ba_sq[i]);
  norm[i] = RootOfSquared(squared);
}

__global__ void __launch_bounds__(kThreads)
    MagnitudeScaleKernel(Magnitude magnitude, const float* norm, float eps, int64_t size, float* g,
                         uint32_t* degenerate) {
  LaunchDependents();
  WaitForPrevious();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const float m = MagnitudeAt(magnitude, i);
  const float scale = ScaleOf(m, norm[i], eps);
  g[i] = scale;
  if (degenerate != nullptr && Degenerate(m, norm[i], scale, eps)) *degenerate = 1;
}

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();

template <typename T>
cudaError_t SquaredRowNormsAs(const T* w, int64_t rows, int64_t columns, float* out,
                              cudaStream_t stream) {
  if (rows < 0 || columns < 0 || rows > kMostRows) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  constexpr int kSize = 16 / sizeof(T);
  constexpr int64_t kRowsOfBlock = kThreads / kWarp;
  const auto blocks = static_cast<unsigned>((rows + kRowsOfBlock - 1) / kRowsOfBlock);
  if (columns % kSize == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0) {
    SquaredRowNormsKernel<T, kSize><<<blocks, kThreads, 0, stream>>>(w, rows, columns, out);
  } else {
    SquaredRowNormsKernel<T, 1><<<blocks, kThreads, 0, stream>>>(w, rows, columns, out);
  }
  return cudaGetLastError();
}

unsigned BlocksFor(int64_t size) { return static_cast<unsigned>((size + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t SquaredRowNorms(const __nv_bfloat16* w, int64_t rows, int64_t columns, float* out,
                            cudaStream_t stream) {
  return SquaredRowNormsAs(w, rows, columns, out, stream);
}

cudaError_t SquaredRowNorms(const float* w, int64_t rows, int64_t columns, float* out,
                            cudaStream_t stream) {
  return SquaredRowNormsAs(w, rows, columns, out, stream);
}

cudaError_t AssembleNorms(const NormAssemblyParams& params, cudaStream_t stream) {
  if (params.size < 0 || params.size > kMostRows) return cudaErrorInvalidValue;
  if (params.size == 0) return cudaSuccess;
  return LaunchEarly(AssembleNormsKernel, BlocksFor(params.size), kThreads, 0, stream,
                     params.base_sq, params.cross, params.ba_sq, params.norm, params.size,
                     static_cast<float>(2.0 * params.scale),
                     static_cast<float>(params.scale * params.scale), params.scale != 0.0);
}

cudaError_t MagnitudeScale(Magnitude magnitude, const float* norm, float eps, int64_t size,
                           float* g, uint32_t* degenerate, cudaStream_t stream) {
  if (size < 0 || size > kMostRows) return cudaErrorInvalidValue;
  if (size == 0) return cudaSuccess;
  return LaunchEarly(MagnitudeScaleKernel, BlocksFor(size), kThreads, 0, stream, magnitude, norm,
                     eps, size, g, degenerate);
}

}  // namespace dorad::kernels
