#include "kernels/dora/linear_instance.cuh"

namespace dorad::kernels {

template cudaError_t LaunchShrink<4>(const LinearLaunch& launch);
template cudaError_t LaunchProject<4>(const LinearLaunch& launch);

}  // namespace dorad::kernels
