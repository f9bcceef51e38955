// The barriers of a ring of stages for keys and values in shared memory.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"

namespace dorad::kernels {

// A full one for each stage, then an empty one for each. Where values come and go apart from keys
// (Isa::kApart), the same of the values follow; else they are those of the keys.
template <typename Isa, int kStages>
struct StageBarriers {
  // From a barrier to that of the values.
  static constexpr int kValues = Isa::kApart ? 16 * kStages : 0;
  static constexpr int kBytes = 16 * kStages + kValues;

  // One thread; `fillers` warps fill a stage, `users` free it.
  static __device__ void Init(uint32_t at, int fillers, int users) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(at + 8 * i, fillers);
      BarrierInit(at + 8 * (kStages + i), users);
      if constexpr (Isa::kApart) {
        BarrierInit(at + kValues + 8 * i, fillers);
        BarrierInit(at + kValues + 8 * (kStages + i), users);
      }
    }
  }
};

}  // namespace dorad::kernels
