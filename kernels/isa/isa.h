// The instruction sets that kernels are built for. Thread-safe.
#pragma once

#include <cstdint>

namespace dorad::kernels {

enum class KernelIsa : uint8_t {
  kSm90,  // Hopper's own: wgmma, the copy engine, clusters (sm_90a)
  kMma,   // mma.sync and cp.async: compute capability 8.0 and later, Hopper too
};

// Whether this program has code of the instruction set for the current device.
bool HasKernels(KernelIsa isa);

// kSm90 where there is code of it, else kMma.
KernelIsa BestIsa();

}  // namespace dorad::kernels
