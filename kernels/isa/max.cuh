// The larger of two numbers, NaN if one is. For one thread.
#pragma once

namespace dorad::kernels {

__device__ inline float MaxOrNan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace dorad::kernels
