// Defines LaunchProject<kM, kAdapted>.
#pragma once

#include <type_traits>

#include "kernels/common/status.h"
#include "kernels/dora/linear_grid.cuh"
#include "kernels/dora/linear_launch.h"
#include "kernels/dora/linear_project.cuh"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"

namespace dorad::kernels {

template <typename Isa, int kM, int kPanel, bool kAdapted>
cudaError_t LaunchProjectPanel(const LinearLaunch<Isa>& launch) {
  constexpr int kThreads = ProjectConfig<Isa, kM, kPanel, kAdapted>::kThreads;
  LinearArgs args = launch.args;
  int shared_bytes = 0;
  DORAD_CUDA_RETURN_IF_ERROR(MostSharedBytes(&shared_bytes));
  const ProjectGrid grid =
      PlanGrid<Isa, kM, kPanel, kAdapted>(launch.processors, shared_bytes, &args);
  const auto kernel = ProjectKernel<Isa, kM, kPanel, kAdapted>;
  if constexpr (kAdapted) {
    // Blocks wait for each other, so they must run at the same time.
    int most = 0;
    DORAD_CUDA_RETURN_IF_ERROR(
        MostClustersAtOnce(kernel, grid.cluster, kThreads, grid.dynamic_bytes, &most));
    if (grid.blocks / grid.cluster * args.plan.row_groups > most) {
      return cudaErrorCooperativeLaunchTooLarge;
    }
  }
  return LaunchEarlyInClusters(kernel, grid.cluster, dim3(grid.blocks, args.plan.row_groups),
                               kThreads, grid.dynamic_bytes, launch.stream, launch.w_map,
                               launch.x_map, launch.x_tile_map, args);
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
