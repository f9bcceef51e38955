#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm_launch.h"
#include "kernels/dora/norm_gemm_sm90.cuh"
#include "kernels/isa/launch.h"

namespace dorad::kernels::norm {

cudaError_t LaunchSm90(const RowGemm* gemms, int count, int tile_n, int multiprocessors,
                       cudaStream_t stream) {
  return WithConfig<Config>(gemms[0], tile_n, [&](auto config) {
    using C = decltype(config);
    TensorParams params;
    const BoxRows box_rows = {kTileM, C::y_by_k ? kStepK : C::tile_n, C::z_by_n ? 64 : kTileM};
    DORAD_CUDA_RETURN_IF_ERROR(Describe<C>(gemms, count, box_rows, &params));
    const unsigned blocks = std::min(params.items, static_cast<unsigned>(multiprocessors));
    return LaunchEarly(RowGemmKernel<C>, blocks, kThreads, C::shared_bytes, stream, params);
  });
}

}  // namespace dorad::kernels::norm
