// Launches by programmatic dependent launch. Thread-safe.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "kernels/common/host.h"
#include "kernels/common/status.h"

namespace dorad::kernels {

// Raises a kernel's limit of dynamic shared memory from 48 KB to the current device's maximum. The
// same value for every launch, so that concurrent ones do not overwrite each other's. Done once:
// its calls cost the host more than a launch.
template <typename... Parameters>
cudaError_t AllowSharedMemory(void (*kernel)(Parameters...)) {
  static std::mutex mutex;
  static std::set<std::pair<void (*)(Parameters...), int>> done;
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  if (done.count({kernel, device}) > 0) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes;
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           most - static_cast<int>(attributes.sharedSizeBytes)));
  // Blocks of the next kernel may fit beside this one's.
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  done.emplace(kernel, device);
  return cudaSuccess;
}

// Clusters of `cluster` blocks, along x.
inline cudaLaunchAttribute InClusters(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// The number of clusters of `cluster` blocks that run at once on an idle device, with the maximum
// of shared memory per block. cudaErrorLaunchOutOfResources: none.
template <typename... Parameters>
cudaError_t MostClustersAtOnce(void (*kernel)(Parameters...), int cluster, dim3 block,
                               int* clusters) {
  cudaFuncAttributes attributes;
  DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(kernel));
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  cudaLaunchAttribute clusters_along_x = InClusters(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = cluster;
  config.blockDim = block;
  config.dynamicSmemBytes = attributes.maxDynamicSharedSizeBytes;
  config.attrs = &clusters_along_x;
  config.numAttrs = 1;
  DORAD_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(clusters, kernel, &config));
  return *clusters > 0 ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

// The same without clusters.
template <typename... Parameters>
cudaError_t MostBlocksAtOnce(void (*kernel)(Parameters...), dim3 block, int* blocks) {
  cudaFuncAttributes attributes;
  DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(kernel));
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  DORAD_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, kernel, static_cast<int>(block.x), attributes.maxDynamicSharedSizeBytes));
  int processors = 0;
  DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
  *blocks *= processors;
  return *blocks > 0 ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

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

}  // namespace dorad::kernels
