#include <algorithm>

#include "kernels/dora/elementwise.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/train/factors.h"

namespace dorad::train {
namespace {

using kernels::FloatType;
using kernels::FromFloat;
using kernels::kThreads;
using kernels::ToFloat;
using kernels::Vector;

// A row of blocks has a layer; a thread has `size` adjacent elements of a row of its a, or of its
// b.
template <typename From, typename To, int size>
__global__ void __launch_bounds__(kThreads) ConvertKernel(const __grid_constant__ FactorsParams p) {
  kernels::LaunchDependents();
  kernels::WaitForPrevious();
  const LayerFactors& layer = p.layers[blockIdx.y];
  const int64_t count_a = layer.rank * p.in;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * size;
  const bool is_a = at < count_a;
  if (!is_a) at -= count_a;
  if (is_a ? layer.rounded_a == nullptr && layer.to_a == nullptr
           : layer.to_b == nullptr || at >= layer.out * layer.rank) {
    return;
  }
  const From* const from = static_cast<const From*>(is_a ? layer.a : layer.b) + at;
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
  if (is_a) {
    if (layer.rounded_a != nullptr) store(layer.rounded_a, at, high);
    if (layer.to_a == nullptr) return;
    store(layer.to_a, at, high);
    if (p.terms == 1) return;
    store(layer.to_a, count_a + at, high);
    store(layer.to_a, 2 * count_a + at, low);
  } else if (p.terms == 1) {
    store(layer.to_b, at, high);
  } else {
    const int64_t first = at / layer.rank * 3 * layer.rank + at % layer.rank;
    store(layer.to_b, first, low);
    store(layer.to_b, first + layer.rank, high);
    store(layer.to_b, first + 2 * layer.rank, high);
  }
}

template <typename From, typename To>
cudaError_t Launch(const FactorsParams& p, cudaStream_t stream) {
  constexpr int kSize = 16 / sizeof(From);
  bool vectors = p.in % kSize == 0;
  int64_t most = 0;
  for (int i = 0; i < p.count; ++i) {
    const LayerFactors& layer = p.layers[i];
    vectors = vectors && layer.rank % kSize == 0 && kernels::Aligned(layer.a) &&
              kernels::Aligned(layer.b) && kernels::Aligned(layer.rounded_a) &&
              kernels::Aligned(layer.to_a) && kernels::Aligned(layer.to_b);
    // b comes after a: without it only a's elements have threads.
    most = std::max(most, layer.rank * (p.in + (layer.to_b == nullptr ? 0 : layer.out)));
  }
  if (most == 0) return cudaSuccess;
  const auto launch = [&](auto kernel, int size) {
    const auto blocks = static_cast<unsigned>((most / size + kThreads - 1) / kThreads);
    return kernels::LaunchEarly(kernel, dim3(blocks, static_cast<unsigned>(p.count)), kThreads, 0,
                                stream, p);
  };
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
  if (p.count < 1 || p.count > kMostLayers || p.in < 0 || (p.terms != 1 && p.terms != 3)) {
    return cudaErrorInvalidValue;
  }
  for (int i = 0; i < p.count; ++i) {
    if (p.layers[i].rank < 0 || p.layers[i].out < 0) return cudaErrorInvalidValue;
  }
  switch (p.to) {
    case FloatType::kBF16:
      return LaunchTo<__nv_bfloat16>(p, stream);
    case FloatType::kF16:
      return LaunchTo<__half>(p, stream);
    case FloatType::kF32:
      if (p.from == FloatType::kF32 && p.terms == 1) return Launch<float, float>(p, stream);
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
