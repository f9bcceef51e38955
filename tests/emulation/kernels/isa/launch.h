// The emulator's form of kernels/isa/launch.h: nothing is launched, tests run the blocks.
#pragma once

#include <cuda_runtime_api.h>

namespace dorad::kernels {

template <typename... Arguments>
cudaError_t AllowSharedMemory(Arguments&&... arguments);
template <typename... Arguments>
cudaError_t LaunchEarly(Arguments&&... arguments);

}  // namespace dorad::kernels
