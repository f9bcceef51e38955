// Random values for the tests of norms. Pure functions.
#pragma once

#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/dora/norm.h"
#include "tests/unit/kernels/device.h"

namespace dorad::kernels {

using Bf16 = __nv_bfloat16;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<float> Random(size_t size, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

inline std::vector<Bf16> Rounded(const std::vector<float>& values) {
  std::vector<Bf16> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) rounded[i] = __float2bfloat16_rn(values[i]);
  return rounded;
}

inline double Value(float x) { return x; }
inline double Value(Bf16 x) { return __bfloat162float(x); }

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace dorad::kernels
