// The product's launches, one translation unit for each instruction set. Internal to norm_gemm*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/dora/norm_gemm.h"

namespace dorad::kernels::norm {

// Products of one reduction and one layout of z; tile_n: 128 or 256, as the reduction has it.
// multiprocessors: of the device, one block each at most.
cudaError_t LaunchSm90(const RowGemm* gemms, int count, int tile_n, int multiprocessors,
                       cudaStream_t stream);
cudaError_t LaunchMma(const RowGemm* gemms, int count, int tile_n, int multiprocessors,
                      cudaStream_t stream);

// Calls `launch` with a Config<reduction, tile_n, z_by_n>.
template <template <Reduction, int, bool> typename Config, typename F>
cudaError_t WithConfig(const RowGemm& gemm, int tile_n, F launch) {
  switch (gemm.reduction) {
    case Reduction::kSquare:
      return gemm.z_by_n ? launch(Config<Reduction::kSquare, 256, true>())
                         : launch(Config<Reduction::kSquare, 256, false>());
    case Reduction::kDot:
      return tile_n == 128 ? launch(Config<Reduction::kDot, 128, false>())
                           : launch(Config<Reduction::kDot, 256, false>());
    case Reduction::kStore:
      return launch(Config<Reduction::kStore, 128, false>());
  }
  return cudaErrorInvalidValue;
}

}  // namespace dorad::kernels::norm
