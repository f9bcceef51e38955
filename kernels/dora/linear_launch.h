// One translation unit for each width of the batch: they take long to compile.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

struct LinearLaunch {
  CUtensorMap w_map;
  CUtensorMap x_map;
  LinearArgs args;
  int blocks;
  cudaStream_t stream;
};

template <int kN>
cudaError_t LaunchLinear(const LinearLaunch& launch);

}  // namespace dorad::kernels
