#include "kernels/dora/linear_instance.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<MmaIsa<1, 4, 2>, 2, true>(
    const LinearLaunch<MmaIsa<1, 4, 2>>& launch);

}  // namespace dorad::kernels
