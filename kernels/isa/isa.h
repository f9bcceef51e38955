// The instruction sets that kernels are built for.
#pragma once

#include <cstdint>

namespace dorad::kernels {

enum class KernelIsa : uint8_t {
  kSm90,  // Hopper's own: wgmma, the copy engine, clusters (sm_90a)
  kMma,   // mma.sync and cp.async: compute capability 8.0 and later, Hopper too
};

}  // namespace dorad::kernels
