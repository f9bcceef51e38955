// Defines LaunchShrink<kM> and LaunchProject<kM>.
#pragma once

#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_project.cuh"
#include "kernels/dora/linear_shrink.cuh"

namespace dorad::kernels {

inline constexpr int kSharedBytes = 227 * 1024;  // of a block at most, static and dynamic
inline constexpr int kAlignBytes = 1024;         // of the ring

// The shrink leaves room beside it: blocks of the projection come early and fetch weights.
template <int kM>
inline constexpr int kShrinkRingBytes = kM == 1   ? 48 * 1024
                                        : kM == 2 ? 60 * 1024
                                                  : 108 * 1024;
template <int kM>
inline constexpr int kProjectRingBytes = kM == 1 ? 140 * 1024 : 212 * 1024;

// Weights on their way to a block at once: some three times what latency times bandwidth asks for.
inline constexpr int kFlightBytes = 96 * 1024;

// As many stages as fit into ring_bytes; the bytes of those and of what follows them. The tensor
// cores read whole tiles of 64 rows of the batch, of which a stage holds x_rows: the last stage's
// tiles reach into what follows.
template <int kM, int kMaxStages, int kStageChunks = 1>
int DynamicBytes(int weight_bytes, int exchange_bytes, int ring_bytes, LinearArgs* args) {
  const int row_bytes = 2 * kLinearStageK;
  const int stage_bytes = weight_bytes + kStageChunks * args->x_rows * row_bytes;
  args->stages = std::min(kMaxStages, ring_bytes / stage_bytes);
  const int reach = (64 * kM - args->x_rows) * row_bytes;
  return kAlignBytes + args->stages * stage_bytes + std::max(exchange_bytes, reach);
}

// A launch that may begin before the kernel before it ends.
template <typename... Args>
cudaError_t LaunchEarly(void (*kernel)(Args...), int blocks, int threads, int cluster,
                        int dynamic_bytes, cudaStream_t stream, const Args&... args) {
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <int kM>
cudaError_t LaunchShrink(const LinearLaunch& launch) {
  using Config = ShrinkConfig<kM>;
  LinearArgs args = launch.args;
  const int dynamic = DynamicBytes<kM, Config::kMaxStages>(
      Config::kFactorBytes, Config::kExchangeBytes, kShrinkRingBytes<kM>, &args);
  return LaunchEarly(ShrinkKernel<kM>, args.shrinkers, Config::kThreads, kLinearSlices, dynamic,
                     launch.stream, launch.x_map, args);
}

template <int kM, int kPanel>
cudaError_t LaunchProjectPanel(const LinearLaunch& launch) {
  using Config = ProjectConfig<kM, kPanel>;
  LinearArgs args = launch.args;
  const int exchange = args.plan.splits > 1 ? Config::kExchangeBytes : 0;
  const int ring =
      std::min(kProjectRingBytes<kM>,
               kSharedBytes - kAlignBytes - exchange -
                   static_cast<int>(sizeof(typename ProjectBlock<kM, kPanel>::Shared)) - 1024);
  const int dynamic = DynamicBytes<kM, Config::kMaxStages, Config::kStageChunks>(
      Config::kWeightBytes, exchange, ring, &args);
  args.flight = std::min(args.stages, std::max(kFlightBytes / Config::kWeightBytes, 2));
  const int cluster = args.siblings * args.plan.splits;
  const int groups = CeilDiv(args.plan.panels, args.siblings);
  // With splits there is one panel for a block; else blocks go from one to the next.
  const int clusters =
      args.plan.splits > 1 ? groups : std::min(groups, std::max(launch.processors / cluster, 1));
  return LaunchEarly(ProjectKernel<kM, kPanel>, clusters * cluster, Config::kThreads, cluster,
                     dynamic, launch.stream, launch.w_map, launch.x_map, args);
}

template <int kM>
cudaError_t LaunchProject(const LinearLaunch& launch) {
  switch (launch.args.plan.panel_rows) {
    case 32:
      return LaunchProjectPanel<kM, 32>(launch);
    case 64:
      return LaunchProjectPanel<kM, 64>(launch);
    case 96:
      return LaunchProjectPanel<kM, 96>(launch);
    case 128:
      return LaunchProjectPanel<kM, 128>(launch);
    case 192:
      return LaunchProjectPanel<kM, 192>(launch);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
