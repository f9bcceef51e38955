#include "kernels/dora/linear_instance.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<4, true>(const LinearLaunch& launch);

}  // namespace dorad::kernels
