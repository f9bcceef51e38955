// Launches, by programmatic dependent launch and without. Thread-safe.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "kernels/common/status.h"
#include "kernels/isa/device.h"

namespace dorad::kernels {

// Whether kernels on the current device are code for sm_90 or later, which knows programmatic
// dependent launch. A kernel without its instructions would not wait for the one before it.
bool KnowDependentLaunch();

// Enqueues a kernel whose blocks may start as soon as all blocks of the stream's previous kernel
// have started and called LaunchDependents. The kernel must call WaitForPrevious before it uses
// memory that earlier kernels write or read, and in any case before it ends: the next kernel relies
// on that. Clusters of `cluster` blocks, along x. Older code waits for the previous kernel.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarlyInClusters(void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 block,
                                  size_t shared_bytes, cudaStream_t stream,
                                  Arguments&&... arguments) {
  if (shared_bytes > 0) DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(kernel));
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (KnowDependentLaunch()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) attributes[count++] = InClusters(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// The same without clusters.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarly(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Arguments&&... arguments) {
  return LaunchEarlyInClusters(kernel, /*cluster=*/1, grid, block, shared_bytes, stream,
                               std::forward<Arguments>(arguments)...);
}

// Enqueues a kernel whose blocks start when the stream's work before it is complete.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchAfter(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Arguments&&... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(std::forward<Arguments>(arguments)...);
  return cudaGetLastError();
}

}  // namespace dorad::kernels
