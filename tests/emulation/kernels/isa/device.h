// The emulator's form of kernels/isa/device.h: tests set emulation::Device.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/emulation/emulator.h"

namespace dorad::kernels {

inline cudaError_t Multiprocessors(int* count) {
  *count = emulation::Emulator::Get().device.processors;
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t MostDynamicBytes(void (*)(Parameters...), int* bytes) {
  *bytes = emulation::Emulator::Get().device.dynamic_bytes;
  return cudaSuccess;
}
inline cudaError_t MostSharedBytes(int* bytes) {
  *bytes = emulation::Emulator::Get().device.dynamic_bytes;
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t MostClustersAtOnce(void (*)(Parameters...), int cluster, int, int, int* clusters) {
  *clusters = emulation::Emulator::Get().device.blocks_at_once / cluster;
  return *clusters > 0 ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

}  // namespace dorad::kernels
