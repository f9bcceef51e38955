// Launches by programmatic dependent launch. Thread-safe.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace dorad::kernels {

// Enqueues a kernel whose blocks may take their places as soon as all blocks of the stream's
// previous kernel have begun and let their dependents start. Its code must wait for what came
// before (WaitForPrevious) before it touches memory that earlier kernels write or read, and every
// kernel must do so before it ends: the kernel after it relies on that.
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
