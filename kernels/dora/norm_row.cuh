// The last steps of a norm, shared so that every path gives the same bits. Device only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/dora/norm.h"

namespace dorad::kernels {

// sqrt(max(x, 0)), NaN kept.
__device__ inline float RootOfSquared(float x) { return __fsqrt_rn(x < 0.0f ? 0.0f : x); }

// base_sq + two_s·cross + s2·ba_sq without FMA contraction.
__device__ inline float AssembledSquare(float base_sq, float two_s, float cross, float s2,
                                        float ba_sq) {
  return __fadd_rn(__fadd_rn(base_sq, __fmul_rn(two_s, cross)), __fmul_rn(s2, ba_sq));
}

__device__ inline float MagnitudeAt(Magnitude magnitude, int64_t row) {
  return magnitude.is_bf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(magnitude.values)[row])
             : static_cast<const float*>(magnitude.values)[row];
}

// m / max(norm, eps), NaN kept.
__device__ inline float ScaleOf(float magnitude, float norm, float eps) {
  return __fdiv_rn(magnitude, norm < eps ? eps : norm);
}

// Whether the norm does not define g = ScaleOf(magnitude, norm, eps).
__device__ inline bool Degenerate(float magnitude, float norm, float g, float eps) {
  return !isfinite(norm) || !isfinite(g) || (norm <= eps && magnitude != 0.0f);
}

}  // namespace dorad::kernels
