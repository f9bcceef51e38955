#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/common/barrier.cuh"
#include "kernels/common/launch.h"
#include "kernels/dora/compose.h"

namespace dorad::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostElements = int64_t{1} << 40;

// `size` elements that are moved at once.
template <typename T, int size>
struct alignas(sizeof(T) * size) Vector {
  T values[size];
};

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// A block's shape: x over a row's vectors, y over rows. Wide enough for the row, so that few
// threads idle at small `out`. threads: at most kThreads.
dim3 BlockFor(int64_t vectors, unsigned threads = kThreads) {
  unsigned x = 32;
  while (x < threads && x < vectors) x *= 2;
  return dim3(x, threads / x);
}

// Rows a thread walks, loading all of them before it uses the first. More rows amortise the load of
// g; fewer keep every multiprocessor busy at small sizes.
constexpr int kRowsLarge = 4;
constexpr int64_t kLargeVectors = 1 << 19;
// Up to this size a call is as long as its start and its end: its inputs are asked for while the
// kernel before it ends.
constexpr int64_t kPrefetchVectors = 1 << 20;

// The grid; y is walked in steps of gridDim.y where rows need more than a grid has.
dim3 GridFor(dim3 block, int64_t vectors, int64_t rows, int rows_each) {
  const int64_t x = (vectors + block.x - 1) / block.x;
  const int64_t per_block = static_cast<int64_t>(block.y) * rows_each;
  const int64_t y = std::min<int64_t>(65535, (rows + per_block - 1) / per_block);
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

// Brings what a block loads first into L2. Harmless while earlier kernels still write it: all their
// writes go through L2 as well.
template <typename T, int size, int rows_each>
__device__ void PrefetchInputs(const ComposeParams& p, int64_t column) {
  constexpr int kLanesOfLine = std::max<int>(1, 128 / (size * sizeof(T)));
  if (threadIdx.x % kLanesOfLine != 0) return;
  const int64_t first = blockIdx.y * static_cast<int64_t>(blockDim.y) * rows_each + threadIdx.y;
#pragma unroll
  for (int i = 0; i < rows_each; ++i) {
    const int64_t row = first + i * blockDim.y;
    if (row >= p.rows) return;
    PrefetchL2(static_cast<const T*>(p.base) + row * p.out + column);
    PrefetchL2(static_cast<const T*>(p.lora) + row * p.out + column);
  }
}

// Pointers are not __restrict__ on purpose: delta may be base or lora. A thread reads all that it
// overwrites before it writes.
template <typename T, int size, int rows_each, bool prefetch>
__global__ void __launch_bounds__(kThreads) ComposeKernel(ComposeParams p) {
  using V = Vector<T, size>;
  LaunchDependents();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
  if (column >= p.out) return;
  if constexpr (prefetch) PrefetchInputs<T, size, rows_each>(p, column);
  WaitForPrevious();
  const auto gs = *reinterpret_cast<const Vector<float, size>*>(p.g + column);
  const int64_t step = static_cast<int64_t>(blockDim.y) * rows_each;
  const T* const base = static_cast<const T*>(p.base) + column;
  const T* const lora = static_cast<const T*>(p.lora) + column;
  T* const delta = static_cast<T*>(p.delta) + column;
  for (int64_t first = blockIdx.y * step + threadIdx.y; first < p.rows; first += gridDim.y * step) {
    V bases[rows_each];
    V loras[rows_each];
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row < p.rows) {
        bases[i] = *reinterpret_cast<const V*>(base + row * p.out);
        loras[i] = *reinterpret_cast<const V*>(lora + row * p.out);
      }
    }
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row >= p.rows) break;
      V result;
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const float g = gs.values[j];
        const float u = __fmul_rn(g, __fmul_rn(p.scale, ToFloat(loras[i].values[j])));
        const float v = __fmul_rn(__fsub_rn(g, 1.0f), ToFloat(bases[i].values[j]));
        result.values[j] = FromFloat<T>(__fadd_rn(v, u));
      }
      *reinterpret_cast<V*>(delta + row * p.out) = result;
    }
  }
}

template <typename T, int size, int rows_each>
__global__ void __launch_bounds__(kThreads) ApplyKernel(ApplyParams p) {
  using F = Vector<float, size>;
  LaunchDependents();
  WaitForPrevious();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * size;
  if (column >= p.out) return;
  F gs;
  F biases;
  if (p.g != nullptr) gs = *reinterpret_cast<const F*>(p.g + column);
  if (p.bias != nullptr) biases = *reinterpret_cast<const F*>(p.bias + column);
  const int64_t step = static_cast<int64_t>(blockDim.y) * rows_each;
  T* const y = static_cast<T*>(p.y) + column;
  for (int64_t first = blockIdx.y * step + threadIdx.y; first < p.rows; first += gridDim.y * step) {
    F bases[rows_each];
    F loras[rows_each];
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row < p.rows) {
        bases[i] = *reinterpret_cast<const F*>(p.base + row * p.base_ld + column);
        if (p.lora != nullptr) {
          loras[i] = *reinterpret_cast<const F*>(p.lora + row * p.lora_ld + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row >= p.rows) break;
      Vector<T, size> result;
#pragma unroll
      for (int j = 0; j < size; ++j) {
        float v = bases[i].values[j];
        if (p.lora != nullptr) v = __fadd_rn(v, __fmul_rn(p.scale, loras[i].values[j]));
        if (p.g != nullptr) v = __fmul_rn(gs.values[j], v);
        if (p.bias != nullptr) v = __fadd_rn(v, biases.values[j]);
        result.values[j] = FromFloat<T>(v);
      }
      *reinterpret_cast<Vector<T, size>*>(y + row * p.y_ld) = result;
    }
  }
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T, int size>
cudaError_t LaunchCompose(const ComposeParams& p, cudaStream_t stream) {
  const int64_t vectors = p.out / size;
  const int64_t all = vectors * p.rows;
  // Small blocks leave sooner, and the next ones start sooner; single elements need many threads.
  const dim3 block = BlockFor(vectors, size > 1 ? 128 : kThreads);
  if (all < kLargeVectors) {
    const dim3 grid = GridFor(block, vectors, p.rows, 1);
    return LaunchEarly(ComposeKernel<T, size, 1, true>, grid, block, 0, stream, p);
  }
  const dim3 grid = GridFor(block, vectors, p.rows, kRowsLarge);
  return LaunchEarly(all < kPrefetchVectors ? ComposeKernel<T, size, kRowsLarge, true>
                                            : ComposeKernel<T, size, kRowsLarge, false>,
                     grid, block, 0, stream, p);
}

template <typename T>
cudaError_t ComposeAs(const ComposeParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const bool vectors =
      p.out % kSize == 0 && Aligned(p.base) && Aligned(p.lora) && Aligned(p.delta) && Aligned(p.g);
  return vectors ? LaunchCompose<T, kSize>(p, stream) : LaunchCompose<T, 1>(p, stream);
}

template <typename T, int size>
cudaError_t LaunchApply(const ApplyParams& p, cudaStream_t stream) {
  const int64_t vectors = p.out / size;
  const dim3 block = BlockFor(vectors);
  if (vectors * p.rows >= kLargeVectors) {
    const dim3 grid = GridFor(block, vectors, p.rows, kRowsLarge);
    return LaunchEarly(ApplyKernel<T, size, kRowsLarge>, grid, block, 0, stream, p);
  }
  const dim3 grid = GridFor(block, vectors, p.rows, 1);
  return LaunchEarly(ApplyKernel<T, size, 1>, grid, block, 0, stream, p);
}

template <typename T>
cudaError_t ApplyAs(const ApplyParams& p, cudaStream_t stream) {
  constexpr int kSize = 4;  // 16 bytes of the inputs
  const bool vectors = p.out % kSize == 0 && p.base_ld % kSize == 0 && p.y_ld % kSize == 0 &&
                       (p.lora == nullptr || p.lora_ld % kSize == 0) && Aligned(p.base) &&
                       Aligned(p.lora) && Aligned(p.g) && Aligned(p.bias) && Aligned(p.y);
  return vectors ? LaunchApply<T, kSize>(p, stream) : LaunchApply<T, 1>(p, stream);
}

bool GoodSizes(int64_t rows, int64_t out) {
  return rows >= 0 && out >= 0 && (rows == 0 || out <= kMostElements / rows);
}

}  // namespace

cudaError_t Compose(const ComposeParams& params, cudaStream_t stream) {
  if (!GoodSizes(params.rows, params.out)) return cudaErrorInvalidValue;
  if (params.rows == 0 || params.out == 0) return cudaSuccess;
  switch (params.type) {
    case FloatType::kF32:
      return ComposeAs<float>(params, stream);
    case FloatType::kBF16:
      return ComposeAs<__nv_bfloat16>(params, stream);
    case FloatType::kF16:
      return ComposeAs<__half>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t Apply(const ApplyParams& params, cudaStream_t stream) {
  if (!GoodSizes(params.rows, params.out)) return cudaErrorInvalidValue;
  if (params.base_ld < params.out || params.y_ld < params.out ||
      (params.lora != nullptr && params.lora_ld < params.out)) {
    return cudaErrorInvalidValue;
  }
  if (params.rows == 0 || params.out == 0) return cudaSuccess;
  switch (params.y_type) {
    case FloatType::kF32:
      return ApplyAs<float>(params, stream);
    case FloatType::kBF16:
      return ApplyAs<__nv_bfloat16>(params, stream);
    case FloatType::kF16:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels
