#include "kernels/dora/linear_instance.cuh"
#include "kernels/isa/mma/isa.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<MmaIsa<4>, 4, true>(const LinearLaunch<MmaIsa<4>>& launch);

}  // namespace dorad::kernels
