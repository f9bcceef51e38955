// Launches by programmatic dependent launch. Internal to kernels/dora.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace dorad::kernels {

// Enqueues a kernel whose blocks may take their places while the stream's previous kernel ends: its
// code must wait for earlier kernels (griddepcontrol.wait) before it touches memory.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarly(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace dorad::kernels
