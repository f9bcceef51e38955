#include <algorithm>

#include "kernels/dora/compose.h"
#include "kernels/dora/elementwise.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/memory.cuh"

namespace dorad::kernels {
namespace {

// Rows of a thread; it loads all of them before it uses the first. More rows amortise the load of
// g; fewer keep every multiprocessor busy at small sizes.
constexpr int kRowsLarge = 4;
constexpr int64_t kLargeVectors = 1 << 19;
// Up to this size, start and end dominate a call: its inputs are prefetched while the previous
// kernel ends.
constexpr int64_t kPrefetchVectors = 1 << 20;

// Prefetches a block's first loads to L2. Safe while earlier kernels still write: all their writes
// go through L2 as well.
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

// Pointers are deliberately not __restrict__: delta may be base or lora. A thread reads all inputs
// before it overwrites them.
template <typename T, int size, int rows_each, bool prefetch, bool keep_inner>
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
  T* const inner = static_cast<T*>(p.inner) + column;
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
      V sum;
#pragma unroll
      for (int j = 0; j < size; ++j) {
        const float g = gs.values[j];
        const float t = __fmul_rn(p.scale, ToFloat(loras[i].values[j]));
        const float u = __fmul_rn(g, t);
        const float v = __fmul_rn(__fsub_rn(g, 1.0f), ToFloat(bases[i].values[j]));
        result.values[j] = FromFloat<T>(__fadd_rn(v, u));
        sum.values[j] = FromFloat<T>(__fadd_rn(ToFloat(bases[i].values[j]), t));
      }
      *reinterpret_cast<V*>(delta + row * p.out) = result;
      if constexpr (keep_inner) *reinterpret_cast<V*>(inner + row * p.out) = sum;
    }
  }
}

// T: of base and lora; Y: of y.
template <typename T, typename Y, int size, int rows_each>
__global__ void __launch_bounds__(kThreads) ApplyKernel(ApplyParams p) {
  using V = Vector<T, size>;
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
  const T* const base = static_cast<const T*>(p.base) + column;
  const T* const lora = static_cast<const T*>(p.lora) + column;
  Y* const y = static_cast<Y*>(p.y) + column;
  Y* const inner = static_cast<Y*>(p.inner) + column;
  for (int64_t first = blockIdx.y * step + threadIdx.y; first < p.rows; first += gridDim.y * step) {
    V bases[rows_each];
    V loras[rows_each];
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row < p.rows) {
        bases[i] = *reinterpret_cast<const V*>(base + row * p.base_ld);
        if (p.lora != nullptr) loras[i] = *reinterpret_cast<const V*>(lora + row * p.lora_ld);
      }
    }
#pragma unroll
    for (int i = 0; i < rows_each; ++i) {
      const int64_t row = first + i * blockDim.y;
      if (row >= p.rows) break;
      Vector<Y, size> result;
      Vector<Y, size> sum;
#pragma unroll
      for (int j = 0; j < size; ++j) {
        float v = ToFloat(bases[i].values[j]);
        if (p.lora != nullptr) v = __fadd_rn(v, __fmul_rn(p.scale, ToFloat(loras[i].values[j])));
        sum.values[j] = FromFloat<Y>(v);
        if (p.g != nullptr) v = __fmul_rn(gs.values[j], v);
        if (p.bias != nullptr) v = __fadd_rn(v, biases.values[j]);
        result.values[j] = FromFloat<Y>(v);
      }
      *reinterpret_cast<Vector<Y, size>*>(y + row * p.y_ld) = result;
      if (p.inner != nullptr) *reinterpret_cast<Vector<Y, size>*>(inner + row * p.y_ld) = sum;
    }
  }
}

template <typename T, int size, bool keep_inner>
cudaError_t LaunchCompose(const ComposeParams& p, cudaStream_t stream) {
  const int64_t vectors = p.out / size;
  const int64_t all = vectors * p.rows;
  // Small blocks end sooner, and the next ones start sooner; single elements need many threads.
  const dim3 block = BlockFor(vectors, size > 1 ? 128 : kThreads);
  if (all < kLargeVectors) {
    const dim3 grid = GridFor(block, vectors, p.rows, 1);
    return LaunchEarly(ComposeKernel<T, size, 1, true, keep_inner>, grid, block, 0, stream, p);
  }
  const dim3 grid = GridFor(block, vectors, p.rows, kRowsLarge);
  return LaunchEarly(all < kPrefetchVectors ? ComposeKernel<T, size, kRowsLarge, true, keep_inner>
                                            : ComposeKernel<T, size, kRowsLarge, false, keep_inner>,
                     grid, block, 0, stream, p);
}

template <typename T>
cudaError_t ComposeAs(const ComposeParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const bool vectors = p.out % kSize == 0 && Aligned(p.base) && Aligned(p.lora) &&
                       Aligned(p.delta) && Aligned(p.inner) && Aligned(p.g);
  if (p.inner == nullptr) {
    return vectors ? LaunchCompose<T, kSize, false>(p, stream)
                   : LaunchCompose<T, 1, false>(p, stream);
  }
  return vectors ? LaunchCompose<T, kSize, true>(p, stream) : LaunchCompose<T, 1, true>(p, stream);
}

template <typename T, typename Y, int size>
cudaError_t LaunchApply(const ApplyParams& p, cudaStream_t stream) {
  const int64_t vectors = p.out / size;
  const dim3 block = BlockFor(vectors);
  if (vectors * p.rows >= kLargeVectors) {
    const dim3 grid = GridFor(block, vectors, p.rows, kRowsLarge);
    return LaunchEarly(ApplyKernel<T, Y, size, kRowsLarge>, grid, block, 0, stream, p);
  }
  const dim3 grid = GridFor(block, vectors, p.rows, 1);
  return LaunchEarly(ApplyKernel<T, Y, size, 1>, grid, block, 0, stream, p);
}

template <typename T, typename Y>
cudaError_t ApplyAs(const ApplyParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(T);
  const bool vectors = p.out % kSize == 0 && p.base_ld % kSize == 0 && p.y_ld % kSize == 0 &&
                       (p.lora == nullptr || p.lora_ld % kSize == 0) && Aligned(p.base) &&
                       Aligned(p.lora) && Aligned(p.g) && Aligned(p.bias) && Aligned(p.y) &&
                       Aligned(p.inner);
  return vectors ? LaunchApply<T, Y, kSize>(p, stream) : LaunchApply<T, Y, 1>(p, stream);
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
  if (params.type == FloatType::kF32 && params.y_type == FloatType::kBF16) {
    return ApplyAs<float, __nv_bfloat16>(params, stream);
  }
  if (params.type == FloatType::kF32 && params.y_type == FloatType::kF16) {
    return ApplyAs<float, __half>(params, stream);
  }
  if (params.type != params.y_type) return cudaErrorInvalidValue;
  switch (params.type) {
    case FloatType::kF32:
      return ApplyAs<float, float>(params, stream);
    case FloatType::kBF16:
      return ApplyAs<__nv_bfloat16, __nv_bfloat16>(params, stream);
    case FloatType::kF16:
      return ApplyAs<__half, __half>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels
