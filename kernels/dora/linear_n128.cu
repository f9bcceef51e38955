#include "kernels/dora/linear_instance.cuh"

namespace dorad::kernels {

template cudaError_t LaunchLinear<128>(const LinearLaunch& launch);

}  // namespace dorad::kernels
