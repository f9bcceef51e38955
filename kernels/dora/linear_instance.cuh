// Defines LaunchLinear<kN>.
#pragma once

#include "kernels/common/status.h"
#include "kernels/dora/linear_kernel.cuh"
#include "kernels/dora/linear_launch.h"

namespace dorad::kernels {

template <int kGroups, int kN>
cudaError_t LaunchLinearGroups(const LinearLaunch& launch) {
  using Config = LinearConfig<kGroups, kN>;
  auto* kernel = LinearKernel<kGroups, kN>;
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kDynamicBytes));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kDynamicBytes;
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, launch.w_map, launch.x_map, launch.args);
}

template <int kN>
cudaError_t LaunchLinear(const LinearLaunch& launch) {
  if constexpr (kN <= 128) {
    if (launch.args.plan.groups == 3) return LaunchLinearGroups<3, kN>(launch);
  }
  return LaunchLinearGroups<2, kN>(launch);
}

}  // namespace dorad::kernels
