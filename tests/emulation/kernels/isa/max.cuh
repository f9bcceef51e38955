// The emulator's form of kernels/isa/max.cuh.
#pragma once

#include <cmath>

namespace dorad::kernels {

inline float MaxOrNan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

}  // namespace dorad::kernels
