#include <atomic>

#include "server/backends/cpu/simd/kernels.h"

namespace dorad::ops::cpu {

namespace baseline {
extern const Kernels kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
namespace avx512bf16 {
extern const Kernels kTable;
}
#endif

namespace {

struct Supported {
  const Kernels* tables[4];
  int size = 0;

  Supported() {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) tables[size++] = &avx512bf16::kTable;
    if (avx512) tables[size++] = &avx512::kTable;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      tables[size++] = &avx2::kTable;
    }
#endif
    tables[size++] = &baseline::kTable;
  }
};

const Supported& SupportedOnce() {
  static const Supported supported;
  return supported;
}

std::atomic<const Kernels*>& Active() {
  static std::atomic<const Kernels*> active{SupportedOnce().tables[0]};
  return active;
}

}  // namespace

KernelList SupportedKernels() { return {SupportedOnce().tables, SupportedOnce().size}; }

const Kernels& ActiveKernels() { return *Active().load(std::memory_order_relaxed); }

void SetActiveKernels(const Kernels& kernels) {
  Active().store(&kernels, std::memory_order_relaxed);
}

}  // namespace dorad::ops::cpu
