// Values of the types that element-wise kernels take, for their tests.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/dora/compose.h"

namespace dorad::kernels {

inline float ToFloat(float x) { return x; }
inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float ToFloat(__half x) { return __half2float(x); }

template <typename T>
T FromFloat(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return __float2half_rn(x);
  }
}

template <typename T>
constexpr FloatType TypeOf() {
  if constexpr (std::is_same_v<T, float>) return FloatType::kF32;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return FloatType::kBF16;
  return FloatType::kF16;
}

template <typename T>
std::vector<T> RandomValues(size_t size, float mean, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<T> values(size);
  for (T& value : values) value = FromFloat<T>(normal(random));
  return values;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace dorad::kernels
