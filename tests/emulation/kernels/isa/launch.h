// The emulator's form of kernels/isa/launch.h: one stream, whose kernels Emulator::Run runs.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <tuple>

#include "kernels/common/status.h"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/device.h"
#include "tests/emulation/emulator.h"

namespace dorad::kernels {

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarlyInClusters(void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 block,
                                  size_t shared_bytes, cudaStream_t, Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> parameters(arguments...);
  emulation::Emulator::Get().Launch(grid, static_cast<int>(block.x), cluster,
                                    static_cast<uint32_t>(shared_bytes),
                                    [=] { std::apply(kernel, parameters); });
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarly(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Arguments&&... arguments) {
  return LaunchEarlyInClusters(kernel, /*cluster=*/1, grid, block, shared_bytes, stream,
                               arguments...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchAfter(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t, Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> parameters(arguments...);
  emulation::Emulator::Get().Launch(grid, static_cast<int>(block.x), /*cluster=*/1,
                                    static_cast<uint32_t>(shared_bytes), [=] {
                                      WaitForPrevious();
                                      std::apply(kernel, parameters);
                                    });
  return cudaSuccess;
}

}  // namespace dorad::kernels
