// The current device's limits, and how many blocks of a kernel it runs at once. Thread-safe.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "kernels/common/status.h"

namespace dorad::kernels {

inline cudaError_t Multiprocessors(int* count) {
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// Shared memory of a block at most, static and dynamic.
inline cudaError_t MostSharedBytes(int* bytes) {
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// The dynamic one's part, of a kernel's blocks.
template <typename... Parameters>
cudaError_t MostDynamicBytes(void (*kernel)(Parameters...), int* bytes) {
  cudaFuncAttributes attributes;
  DORAD_CUDA_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  DORAD_CUDA_RETURN_IF_ERROR(MostSharedBytes(bytes));
  *bytes -= static_cast<int>(attributes.sharedSizeBytes);
  return cudaSuccess;
}

// Raises a kernel's limit of dynamic shared memory from 48 KB to the maximum. The same value for
// every launch, so that concurrent ones do not overwrite each other's. Done once: its calls cost
// the host more than a launch.
template <typename... Parameters>
cudaError_t AllowSharedMemory(void (*kernel)(Parameters...)) {
  static std::mutex mutex;
  static std::set<std::pair<void (*)(Parameters...), int>> done;
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  if (done.count({kernel, device}) > 0) return cudaSuccess;
  int most = 0;
  DORAD_CUDA_RETURN_IF_ERROR(MostDynamicBytes(kernel, &most));
  DORAD_CUDA_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
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

// The number of clusters of `cluster` blocks, each with so much dynamic shared memory, that run at
// once on an idle device. Blocks that wait for each other may be no more. Asked once, as above.
// cudaErrorLaunchOutOfResources: none.
template <typename... Parameters>
cudaError_t MostClustersAtOnce(void (*kernel)(Parameters...), int cluster, int threads,
                               int dynamic_bytes, int* clusters) {
  static std::mutex mutex;
  static std::map<std::tuple<void (*)(Parameters...), int, int, int, int>, int> known;
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  int& most = known[{kernel, cluster, threads, dynamic_bytes, device}];
  if (most == 0) {
    DORAD_CUDA_RETURN_IF_ERROR(AllowSharedMemory(kernel));
    if (cluster > 1) {
      cudaLaunchAttribute clusters_along_x = InClusters(cluster);
      cudaLaunchConfig_t config = {};
      config.gridDim = cluster;
      config.blockDim = threads;
      config.dynamicSmemBytes = dynamic_bytes;
      config.attrs = &clusters_along_x;
      config.numAttrs = 1;
      DORAD_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&most, kernel, &config));
    } else {
      int of_one = 0, processors = 0;
      DORAD_CUDA_RETURN_IF_ERROR(
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kernel, threads, dynamic_bytes));
      DORAD_CUDA_RETURN_IF_ERROR(Multiprocessors(&processors));
      most = of_one * processors;
    }
  }
  *clusters = most;
  return most > 0 ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

}  // namespace dorad::kernels
