#include "kernels/common/barrier.cuh"
#include "kernels/common/launch.h"
#include "kernels/dora/elementwise.cuh"
#include "kernels/train/factors.h"

namespace dorad::train {
namespace {

using kernels::FloatType;
using kernels::FromFloat;
using kernels::kThreads;
using kernels::ToFloat;
using kernels::Vector;

// A thread has `size` adjacent elements of a row of a, or of b.
template <typename From, typename To, int size>
__global__ void __launch_bounds__(kThreads) ConvertKernel(FactorsParams p) {
  kernels::LaunchDependents();
  kernels::WaitForPrevious();
  const int64_t count_a = p.rank * p.in;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * size;
  const bool is_a = at < count_a;
  if (!is_a) at -= count_a;
  if (!is_a && at >= p.out * p.rank) return;
  const From* const from = static_cast<const From*>(is_a ? p.a : p.b) + at;
  const auto values = *reinterpret_cast<const Vector<From, size>*>(from);
  Vector<To, size> high;
  Vector<To, size> low;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const float value = ToFloat(values.values[i]);
    high.values[i] = FromFloat<To>(value);
    low.values[i] = FromFloat<To>(__fsub_rn(value, ToFloat(high.values[i])));
  }
  const auto store = [](void* to, int64_t index, const Vector<To, size>& value) {
    *reinterpret_cast<Vector<To, size>*>(static_cast<To*>(to) + index) = value;
  };
  if (p.terms == 1) {
    store(is_a ? p.to_a : p.to_b, at, high);
  } else if (is_a) {
    store(p.to_a, at, high);
    store(p.to_a, count_a + at, high);
    store(p.to_a, 2 * count_a + at, low);
  } else {
    const int64_t first = at / p.rank * 3 * p.rank + at % p.rank;
    store(p.to_b, first, low);
    store(p.to_b, first + p.rank, high);
    store(p.to_b, first + 2 * p.rank, high);
  }
}

template <typename From, typename To>
cudaError_t Launch(const FactorsParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(From);
  const auto launch = [&](auto kernel, int size) {
    const int64_t vectors = (p.rank * p.in + p.out * p.rank) / size;
    const auto blocks = static_cast<unsigned>((vectors + kThreads - 1) / kThreads);
    return kernels::LaunchEarly(kernel, blocks, kThreads, 0, stream, p);
  };
  const bool vectors = p.rank % kSize == 0 && p.in % kSize == 0 && kernels::Aligned(p.a) &&
                       kernels::Aligned(p.b) && kernels::Aligned(p.to_a) &&
                       kernels::Aligned(p.to_b);
  return vectors ? launch(ConvertKernel<From, To, kSize>, kSize)
                 : launch(ConvertKernel<From, To, 1>, 1);
}

template <typename To>
cudaError_t LaunchTo(const FactorsParams& p, cudaStream_t stream) {
  switch (p.from) {
    case FloatType::kF32:
      return Launch<float, To>(p, stream);
    case FloatType::kBF16:
      return Launch<__nv_bfloat16, To>(p, stream);
    case FloatType::kF16:
      return Launch<__half, To>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t ConvertFactors(const FactorsParams& p, cudaStream_t stream) {
  if (p.rank < 0 || p.in < 0 || p.out < 0 || (p.terms != 1 && p.terms != 3)) {
    return cudaErrorInvalidValue;
  }
  if (p.rank == 0 || p.in + p.out == 0) return cudaSuccess;
  switch (p.to) {
    case FloatType::kBF16:
      return LaunchTo<__nv_bfloat16>(p, stream);
    case FloatType::kF16:
      return LaunchTo<__half>(p, stream);
    case FloatType::kF32:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t CheckDevice() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, ConvertKernel<float, __nv_bfloat16, 1>);
  if (error != cudaSuccess) cudaGetLastError();  // So that no later launch reports it.
  return error;
}

}  // namespace dorad::train
