// The exact form of gelu, as torch has it. Thread-safe.
#pragma once

namespace dorad::kernels {

struct ExactGelu {
  __device__ float operator()(float x) const {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  }
};

}  // namespace dorad::kernels
