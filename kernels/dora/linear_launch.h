// The launches behind DoraLinear.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/dora/linear_args.h"
#include "kernels/dora/linear_plan.h"

namespace dorad::kernels {

// By instruction set. The plan is PlanLinear's, or PlanMmaLinear's.
cudaError_t LaunchLinearSm90(const DoraLinearParams& params, const LinearPlan& plan, int processors,
                             cudaStream_t stream);
cudaError_t LaunchLinearMma(const DoraLinearParams& params, const LinearPlan& plan, int processors,
                            cudaStream_t stream);

template <typename Isa>
struct LinearLaunch {
  typename Isa::Matrix x_map;       // boxes of args.x_rows >> args.log_siblings rows
  typename Isa::Matrix x_tile_map;  // boxes of min(64, args.x_rows) rows
  typename Isa::Matrix w_map;
  LinearArgs args;  // PlanGrid completes them
  int processors;
  cudaStream_t stream;
};

// One translation unit for each instruction set and size of the batch, without and with adapters,
// because they compile slowly. kM: tiles of 64 rows of the batch, 1, 2 or 4. kAdapted: whether
// args.p.max_rank > 0; then args.shares and args.h are written.
template <typename Isa, int kM, bool kAdapted>
cudaError_t LaunchProject(const LinearLaunch<Isa>& launch);

}  // namespace dorad::kernels
