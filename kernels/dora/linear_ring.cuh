// The ring of a projection: a panel's weights and the batch arrive apart.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"
#include "kernels/pipeline/ring.cuh"

namespace dorad::kernels {

// Three barriers for each stage: weights have arrived, the batch has arrived, the stage is free.
template <int kMaxStages>
struct LinearRingBarriers {
  uint64_t weights_full[kMaxStages];
  uint64_t batch_full[kMaxStages];
  uint64_t empty[kMaxStages];

  // One warp: a single thread would initialise them one after the other. Arrivals for a stage's
  // weights and for its batch; `users` arrivals free it.
  __device__ void Init(int stages, int weights, int batch, int users) {
    static_assert(kMaxStages <= 32);
    const int i = static_cast<int>(threadIdx.x % 32);
    if (i < stages) {
      BarrierInit(SharedAddress(&weights_full[i]), weights);
      BarrierInit(SharedAddress(&batch_full[i]), batch);
      BarrierInit(SharedAddress(&empty[i]), users);
    }
  }
};

// Ring::full is the batch's.
class LinearRing : public Ring {
 public:
  // data: 1024-byte aligned.
  template <int kMaxStages>
  __device__ LinearRing(LinearRingBarriers<kMaxStages>& barriers, uint32_t data, int stages,
                        int weight_bytes, int stage_bytes)
      : Ring(data, SharedAddress(barriers.batch_full), SharedAddress(barriers.empty), stages,
             stage_bytes),
        weights_full_(SharedAddress(barriers.weights_full)),
        weight_bytes_(weight_bytes) {}

  __device__ uint32_t weights() const { return Stage(); }
  __device__ uint32_t batch() const { return Stage() + weight_bytes_; }
  __device__ uint32_t weights_full() const { return weights_full_ + 8 * stage; }
  __device__ uint32_t batch_full() const { return Full(); }

  __device__ void WaitFull() const {
    Ring::WaitFull();
    BarrierWait(weights_full(), parity);
  }
  // Waits until the weights of `count` stages before this one have arrived.
  __device__ void WaitArrived(int count) const {
    const int oldest = stage - count;
    BarrierWait(weights_full_ + 8 * (oldest < 0 ? oldest + stages : oldest),
                oldest < 0 ? parity ^ 1 : parity);
  }

 private:
  const uint32_t weights_full_;
  const int weight_bytes_;
};

}  // namespace dorad::kernels
