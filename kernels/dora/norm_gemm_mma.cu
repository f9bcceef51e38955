#include <algorithm>

#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm_launch.h"
#include "kernels/dora/norm_gemm_mma.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/launch.h"
#include "kernels/isa/shared.cuh"

namespace dorad::kernels::norm {
namespace {

template <typename C>
__global__ void __launch_bounds__(kMmaThreads, 1)
    RowGemmMmaKernel(const __grid_constant__ PlainParams p) {
  struct Barriers {
    uint64_t full[kMmaStages];
  };
  LaunchDependents();
  WaitForPrevious();
  RowGemmBlock<C>(p, SharedAddress(DynamicShared<kAlignment>()),
                  SharedAddress(&StaticShared<Barriers>()));
}

}  // namespace

cudaError_t LaunchMma(const RowGemm* gemms, int count, int tile_n, int multiprocessors,
                      cudaStream_t stream) {
  return WithConfig<MmaConfig>(gemms[0], tile_n, [&](auto config) {
    using C = decltype(config);
    PlainParams params;
    DORAD_CUDA_RETURN_IF_ERROR(
        Describe<C>(gemms, count, {kWarpRows, kWarpRows, kWarpRows}, &params));
    const unsigned blocks = std::min(params.items, static_cast<unsigned>(multiprocessors));
    return LaunchEarly(RowGemmMmaKernel<C>, blocks, kMmaThreads, kMmaSharedBytes, stream, params);
  });
}

}  // namespace dorad::kernels::norm
