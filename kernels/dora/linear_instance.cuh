// Defines LaunchProject<kM, kAdapted>.
#pragma once

#include <atomic>
#include <type_traits>

#include "kernels/common/host.h"
#include "kernels/common/status.h"
#include "kernels/dora/linear_grid.cuh"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_project.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels {

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
  constexpr int kThreads = ProjectConfig<Isa, kM, kPanel, kAdapted>::kThreads;
  LinearArgs args = launch.args;
  int shared_bytes = 0;
  DORAD_CUDA_RETURN_IF_ERROR(SharedBytes<Isa>(&shared_bytes));
  const ProjectGrid grid =
      PlanGrid<Isa, kM, kPanel, kAdapted>(launch.processors, shared_bytes, &args);
  if constexpr (kAdapted) {
    DORAD_CUDA_RETURN_IF_ERROR((CheckRunAtOnce<Isa, kM, kPanel>(
        grid.cluster, grid.blocks / grid.cluster * args.plan.row_groups)));
  }
  return LaunchEarlyInClusters(ProjectKernel<Isa, kM, kPanel, kAdapted>, grid.cluster,
                               dim3(grid.blocks, args.plan.row_groups), kThreads,
                               grid.dynamic_bytes, launch.stream, launch.w_map, launch.x_map,
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
