// Defines LaunchProject<kM, kAdapted>.
#pragma once

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_project.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {

inline constexpr int kAlignBytes = 1024;  // the most that the ring's alignment takes

// Limits on weights in flight to a block. A long launch is faster with more; a short one waits for
// h, whose transfers queue behind the weights. Latency times bandwidth is some 40 KB.
inline constexpr int kFlightBytes = 96 * 1024;
inline constexpr int kShortFlightBytes = 48 * 1024;
inline constexpr int kShortBytes = 512 * 1024;  // of weights, of a block
// With less to fetch, weights counted twice, a block leaves half of the shared memory to the next
// kernel's. Longer ones are faster with more stages (measured with Qwen3-0.6B's shape).
inline constexpr int kTinyBytes = 280 * 1024;
inline constexpr int kHalfSharedBytes = (228 / 2 - 1) * 1024;  // 1 KiB of each is the system's

// The dynamic shared memory of a block: a ring of stages, and the buffers after it.
struct RingFit {
  int stages;
  int dynamic_bytes;
};

// Warpgroups read whole tiles of 64 rows of the batch, and a stage holds x_rows of them: the last
// stage's tiles extend into the buffers after the ring. A warp by itself reads 16 rows.
template <typename Isa, int kM, int kPanel, bool kAdapted>
constexpr RingFit FitRing(int splits, int x_rows, int shared_bytes) {
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  constexpr int kRowBytes = 2 * kLinearStageK;
  constexpr int kStaticBytes = sizeof(typename ProjectBlock<Isa, kM, kPanel, kAdapted>::Shared);
  const int stage_bytes = Config::kWeightBytes + Config::kStageChunks * x_rows * kRowBytes;
  const int beyond = Isa::kHasCopyEngine ? 64 * kM - x_rows : 0;
  const int after = std::max(splits > 1 ? Config::kExchangeBytes : 0, beyond * kRowBytes);
  const int room = shared_bytes - kStaticBytes - kAlignBytes - after;
  const int stages = std::min(Config::kMaxStages, room / stage_bytes);
  return {stages, kAlignBytes + stages * stage_bytes + after};
}

// Of a block, on the current device: MmaIsa's may have more than the least.
template <typename Isa>
cudaError_t SharedBytes(int* bytes) {
  if constexpr (Isa::kHasCopyEngine) {
    *bytes = Isa::kSharedBytes;
    return cudaSuccess;
  } else {
    return MostSharedBytes(bytes);
  }
}

// Whether at least two stages fit for any batch.
template <typename Isa, int kM, int kPanel, bool kAdapted>
constexpr bool AlwaysFits() {
  constexpr bool kLeavesRoom = ProjectConfig<Isa, kM, kPanel, kAdapted>::kLeavesRoom;
  constexpr int kSharedBytes = kLeavesRoom ? kHalfSharedBytes : Isa::kSharedBytes;
  for (int x_rows = 8; x_rows <= 64 * kM; x_rows += 8) {
    for (const int splits : {1, 2}) {
      if (FitRing<Isa, kM, kPanel, kAdapted>(splits, x_rows, kSharedBytes).stages < 2) {
        return false;
      }
    }
  }
  return true;
}

// Blocks that wait for each other must run at the same time. cudaErrorCooperativeLaunchTooLarge:
// they do not fit even on an idle device.
template <typename Isa, int kM, int kPanel>
cudaError_t CheckRunAtOnce(int cluster, int clusters) {
  static std::atomic<int> known[2] = {};  // by size of the cluster; 0: not yet
  int most = known[cluster - 1];
  if (most == 0) {
    const auto kernel = ProjectKernel<Isa, kM, kPanel, true>;
    constexpr int kThreads = ProjectConfig<Isa, kM, kPanel, true>::kThreads;
    if constexpr (Isa::kHasClusters) {
      DORAD_CUDA_RETURN_IF_ERROR(MostClustersAtOnce(kernel, cluster, kThreads, &most));
    } else {
      DORAD_CUDA_RETURN_IF_ERROR(MostBlocksAtOnce(kernel, kThreads, &most));
    }
    known[cluster - 1] = most;
  }
  return clusters <= most ? cudaSuccess : cudaErrorCooperativeLaunchTooLarge;
}

template <typename Isa, int kM, int kPanel, bool kAdapted>
cudaError_t LaunchProjectPanel(const LinearLaunch<Isa>& launch) {
  using Config = ProjectConfig<Isa, kM, kPanel, kAdapted>;
  LinearArgs args = launch.args;
  static_assert(AlwaysFits<Isa, kM, kPanel, kAdapted>());
  int shared_bytes = 0;
  DORAD_CUDA_RETURN_IF_ERROR(SharedBytes<Isa>(&shared_bytes));
  const int chunks = args.plan.chunks / args.plan.splits;
  const int weight_bytes = chunks * Config::kChunkBytes;  // of a panel
  const int x_bytes = chunks * args.x_rows * 2 * kLinearStageK;
  if (Config::kLeavesRoom && 2 * weight_bytes + x_bytes <= kTinyBytes) {
    shared_bytes = kHalfSharedBytes;
  }
  const RingFit fit =
      FitRing<Isa, kM, kPanel, kAdapted>(args.plan.splits, args.x_rows, shared_bytes);
  args.stages = fit.stages;
  const bool is_short = kAdapted && kM == 1 && weight_bytes < kShortBytes;
  const int flight_bytes = is_short ? kShortFlightBytes : kFlightBytes;
  args.flight = std::min(args.stages, std::max(flight_bytes / Config::kWeightBytes, 2));
  const int blocks = args.plan.splits << args.log_siblings;  // a piece of K of a panel each
  const int cluster = Isa::kHasClusters ? blocks : 1;
  const int groups = CeilDiv(args.plan.panels, 1 << args.log_siblings);
  // With splits in a cluster each block has one panel; else blocks take several.
  const int processors = launch.processors / args.plan.row_groups;
  int clusters = Isa::kHasClusters && args.plan.splits > 1
                     ? groups
                     : std::min(groups, std::max(processors / blocks, 1));
  if constexpr (kAdapted) {
    // Whole teams for the shrink.
    const int teams = std::max(processors / kLinearSlices, 1);
    clusters = std::max(clusters, teams * kLinearSlices / blocks);
    DORAD_CUDA_RETURN_IF_ERROR((CheckRunAtOnce<Isa, kM, kPanel>(
        cluster, clusters * (blocks / cluster) * args.plan.row_groups)));
  }
  return LaunchEarlyInClusters(ProjectKernel<Isa, kM, kPanel, kAdapted>, cluster,
                               dim3(clusters * blocks, args.plan.row_groups), Config::kThreads,
                               fit.dynamic_bytes, launch.stream, launch.w_map, launch.x_map,
                               launch.x_tile_map, args);
}

template <typename Isa, int kM, bool kAdapted>
cudaError_t LaunchProject(const LinearLaunch<Isa>& launch) {
  const auto launch_panel = [&](auto panel) {
    if constexpr (Isa::kHasClusters || IsMmaPanel(kM, panel, kAdapted)) {
      return LaunchProjectPanel<Isa, kM, panel, kAdapted>(launch);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  switch (launch.args.plan.panel_rows) {
    case 32:
      return launch_panel(std::integral_constant<int, 32>());
    case 64:
      return launch_panel(std::integral_constant<int, 64>());
    case 96:
      return launch_panel(std::integral_constant<int, 96>());
    case 128:
      return launch_panel(std::integral_constant<int, 128>());
    case 192:
      return launch_panel(std::integral_constant<int, 192>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dorad::kernels
