// Defines LaunchShrink<kM> and LaunchProject<kM>.
#pragma once

#include <algorithm>

#include "kernels/common/launch.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_project.cuh"
#include "kernels/dora/linear_shrink.cuh"

namespace dorad::kernels {

// Of a block at most, static and dynamic, and what alignment may take of it.
inline constexpr int kSharedBytes = 227 * 1024 - 256;
inline constexpr int kAlignBytes = 1024;  // of the ring

// The shrink leaves room beside it: blocks of the projection come early and fetch weights.
template <int kM>
inline constexpr int kShrinkRingBytes = kM == 1   ? 48 * 1024
                                        : kM == 2 ? 60 * 1024
                                                  : 108 * 1024;
template <int kM>
inline constexpr int kProjectRingBytes = kM == 1 ? 140 * 1024 : 212 * 1024;

// Weights on their way to a block at once: some three times what latency times bandwidth asks for.
inline constexpr int kFlightBytes = 96 * 1024;

// What a block has in dynamic shared memory: a ring of stages, and what follows it.
struct RingFit {
  int stages;
  int dynamic_bytes;
};

// A ring of at most ring_bytes. The tensor cores read whole tiles of 64 rows of the batch, of which
// a stage holds x_rows: the last stage's tiles reach into what follows.
template <int kM, int kMaxStages, int kStageChunks>
constexpr RingFit FitRing(int weight_bytes, int exchange_bytes, int static_bytes, int ring_bytes,
                          int x_rows) {
  constexpr int kRowBytes = 2 * kLinearStageK;
  const int stage_bytes = weight_bytes + kStageChunks * x_rows * kRowBytes;
  const int after = std::max(exchange_bytes, (64 * kM - x_rows) * kRowBytes);
  const int room = std::min(ring_bytes, kSharedBytes - static_bytes - kAlignBytes - after);
  const int stages = std::min(kMaxStages, room / stage_bytes);
  return {stages, kAlignBytes + stages * stage_bytes + after};
}

template <int kM>
constexpr RingFit FitShrink(int x_rows) {
  using Config = ShrinkConfig<kM>;
  return FitRing<kM, Config::kMaxStages, 1>(Config::kFactorBytes, Config::kExchangeBytes,
                                            sizeof(typename ShrinkBlock<kM>::Shared),
                                            kShrinkRingBytes<kM>, x_rows);
}

template <int kM, int kPanel>
constexpr RingFit FitProject(int splits, int x_rows) {
  using Config = ProjectConfig<kM, kPanel>;
  return FitRing<kM, Config::kMaxStages, Config::kStageChunks>(
      Config::kWeightBytes, splits > 1 ? Config::kExchangeBytes : 0,
      sizeof(typename ProjectBlock<kM, kPanel>::Shared), kProjectRingBytes<kM>, x_rows);
}

// Whether two stages at least fit, whatever the batch.
template <int kM, int kPanel>
constexpr bool AlwaysFits() {
  for (int x_rows = 8; x_rows <= 64 * kM; x_rows += 8) {
    if (FitShrink<kM>(x_rows).stages < 2) return false;
    for (const int splits : {1, 2}) {
      if (FitProject<kM, kPanel>(splits, x_rows).stages < 2) return false;
    }
  }
  return true;
}

template <int kM>
cudaError_t LaunchShrink(const LinearLaunch& launch) {
  using Config = ShrinkConfig<kM>;
  LinearArgs args = launch.args;
  const RingFit fit = FitShrink<kM>(args.x_rows);
  args.stages = fit.stages;
  return LaunchEarlyInClusters(ShrinkKernel<kM>, kLinearSlices, args.shrinkers, Config::kThreads,
                               fit.dynamic_bytes, launch.stream, launch.x_map, args);
}

template <int kM, int kPanel>
cudaError_t LaunchProjectPanel(const LinearLaunch& launch) {
  using Config = ProjectConfig<kM, kPanel>;
  LinearArgs args = launch.args;
  static_assert(AlwaysFits<kM, kPanel>());
  const RingFit fit = FitProject<kM, kPanel>(args.plan.splits, args.x_rows);
  args.stages = fit.stages;
  args.flight = std::min(args.stages, std::max(kFlightBytes / Config::kWeightBytes, 2));
  const int cluster = args.siblings * args.plan.splits;
  const int groups = CeilDiv(args.plan.panels, args.siblings);
  // With splits there is one panel for a block; else blocks go from one to the next.
  const int clusters =
      args.plan.splits > 1 ? groups : std::min(groups, std::max(launch.processors / cluster, 1));
  return LaunchEarlyInClusters(ProjectKernel<kM, kPanel>, cluster, clusters * cluster,
                               Config::kThreads, fit.dynamic_bytes, launch.stream, launch.w_map,
                               launch.x_map, args);
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
