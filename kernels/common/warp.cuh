// Exchanges between the lanes of a whole warp.
#pragma once

namespace dorad::kernels {

inline constexpr unsigned kAllLanes = 0xFFFFFFFF;

// The sum over the lanes, in each of them; the order of additions is fixed.
__device__ inline float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

}  // namespace dorad::kernels
