// Checks of pointers and of the device before a launch. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/status.h"

namespace dorad::kernels {

// nullptr counts as aligned; IsThere refuses it.
inline bool IsAligned(const void* pointer, size_t alignment = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// An aligned pointer that is not nullptr.
inline bool IsThere(const void* pointer, size_t alignment) {
  return pointer != nullptr && IsAligned(pointer, alignment);
}

// Of the current device.
inline cudaError_t Multiprocessors(int* count) {
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
inline cudaError_t MostSharedBytes(int* bytes) {  // of a block
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

}  // namespace dorad::kernels
