// One translation unit for each size of the batch: they take long to compile.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

struct LinearLaunch {
  CUtensorMap x_map;  // boxes of min(64, args.x_rows) rows in the shrink, x_rows / siblings else
  CUtensorMap w_map;
  LinearArgs args;  // but for the number of stages
  int processors;
  cudaStream_t stream;
};

// kM: tiles of 64 rows of the batch, 1, 2 or 4. args.h is written.
template <int kM>
cudaError_t LaunchShrink(const LinearLaunch& launch);

template <int kM>
cudaError_t LaunchProject(const LinearLaunch& launch);

}  // namespace dorad::kernels
