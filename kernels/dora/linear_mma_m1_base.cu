#include "kernels/dora/linear_instance.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<MmaIsa<2>, 1, false>(const LinearLaunch<MmaIsa<2>>& launch);
template cudaError_t LaunchProject<MmaIsa<4>, 1, false>(const LinearLaunch<MmaIsa<4>>& launch);

}  // namespace dorad::kernels
