// The shared memory of a block.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"

namespace dorad::kernels {

// The static one: at most one type in a kernel.
template <typename T>
__device__ inline T& StaticShared() {
  __shared__ T shared;
  return shared;
}

// The dynamic one, from its first multiple of kAlignment on; a launch asks for as many bytes more,
// if it is above 128.
template <int kAlignment>
__device__ inline uint8_t* DynamicShared() {
  extern __shared__ __align__(128) uint8_t dynamic[];
  if constexpr (kAlignment <= 128) {
    return dynamic;
  } else {
    return dynamic + (kAlignment - SharedAddress(dynamic) % kAlignment) % kAlignment;
  }
}

}  // namespace dorad::kernels
