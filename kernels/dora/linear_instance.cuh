// Defines LaunchLinear<kN>.
#pragma once

#include <atomic>

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
  const LinearPlan& plan = launch.args.plan;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kDynamicBytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  LinearArgs args = launch.args;
  // Blocks wait for each other, so all of them must be resident: one a multiprocessor is.
  if (plan.splits > 1 && plan.Tiles() <= launch.blocks) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = plan.splits;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    config.numAttrs = 1;
    config.gridDim = dim3(plan.Tiles());
    static std::atomic<int> known[9];  // 1 + the answer for a number of splits
    int resident = known[plan.splits] - 1;
    if (resident < 0) {
      DORAD_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
      known[plan.splits] = resident + 1;
    }
    args.clusters = resident >= plan.panels;
    if (!args.clusters) {
      config.numAttrs = 0;
      config.gridDim = dim3(launch.blocks);
    }
  }
  attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
  ++config.numAttrs;
  return cudaLaunchKernelEx(&config, kernel, launch.w_map, launch.x_map, args);
}

template <int kN>
cudaError_t LaunchLinear(const LinearLaunch& launch) {
  if constexpr (kN <= 128) {
    if (launch.args.plan.groups == 3) return LaunchLinearGroups<3, kN>(launch);
  }
  return LaunchLinearGroups<2, kN>(launch);
}

}  // namespace dorad::kernels
