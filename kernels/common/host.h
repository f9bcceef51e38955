// What launching code asks of pointers and of the device. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/status.h"

namespace dorad::kernels {

// nullptr is aligned: whether it may be one is another question.
inline bool IsAligned(const void* pointer, size_t alignment = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// A pointer that may not be nullptr.
inline bool IsThere(const void* pointer, size_t alignment) {
  return pointer != nullptr && IsAligned(pointer, alignment);
}

// Of the current device.
inline cudaError_t Multiprocessors(int* count) {
  int device = 0;
  DORAD_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace dorad::kernels
