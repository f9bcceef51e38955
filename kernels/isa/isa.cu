#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "kernels/isa/isa.h"
#include "kernels/isa/probe.h"

namespace dorad::kernels {
namespace {

// Compiled as all kernels of kMma are.
__global__ void Probe() {}

}  // namespace

bool HasKernels(KernelIsa isa) {
  static std::mutex mutex;
  static std::map<std::pair<int, KernelIsa>, bool> known;  // by device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({device, isa}, false);
  if (is_new) {
    const void* probe =
        isa == KernelIsa::kSm90 ? Sm90Probe() : reinterpret_cast<const void*>(Probe);
    cudaFuncAttributes attributes;
    at->second = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess;
    if (!at->second) cudaGetLastError();  // so that no later launch reports it
  }
  return at->second;
}

KernelIsa BestIsa() { return HasKernels(KernelIsa::kSm90) ? KernelIsa::kSm90 : KernelIsa::kMma; }

}  // namespace dorad::kernels
