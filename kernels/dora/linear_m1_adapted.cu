#include "kernels/dora/linear_instance.cuh"

namespace dorad::kernels {

template cudaError_t LaunchProject<1, true>(const LinearLaunch& launch);

}  // namespace dorad::kernels
