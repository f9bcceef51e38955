// A position in a ring of stages in shared memory: the same sequence in every role of a block.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"

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

class LinearRing {
 public:
  // data: 1024-byte aligned.
  template <int kMaxStages>
  __device__ LinearRing(LinearRingBarriers<kMaxStages>& barriers, uint32_t data, int stages,
                        int weight_bytes, int stage_bytes)
      : weights_full_(SharedAddress(barriers.weights_full)),
        batch_full_(SharedAddress(barriers.batch_full)),
        empty_(SharedAddress(barriers.empty)),
        data_(data),
        stages_(stages),
        weight_bytes_(weight_bytes),
        stage_bytes_(stage_bytes) {}

  __device__ int stage() const { return stage_; }
  __device__ uint32_t weights() const { return data_ + stage_ * stage_bytes_; }
  __device__ uint32_t batch() const { return weights() + weight_bytes_; }
  __device__ uint32_t weights_full() const { return weights_full_ + 8 * stage_; }
  __device__ uint32_t batch_full() const { return batch_full_ + 8 * stage_; }
  __device__ uint32_t empty(int stage) const { return empty_ + 8 * stage; }

  __device__ void WaitFull() const {
    BarrierWait(batch_full(), parity_);
    BarrierWait(weights_full(), parity_);
  }
  __device__ void WaitEmpty() const { BarrierWait(empty(stage_), parity_ ^ 1); }
  // Waits until the weights of `stages` stages before this one have arrived.
  __device__ void WaitArrived(int stages) const {
    const int oldest = stage_ - stages;
    BarrierWait(weights_full_ + 8 * (oldest < 0 ? oldest + stages_ : oldest),
                oldest < 0 ? parity_ ^ 1 : parity_);
  }
  __device__ void Advance() {
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  const uint32_t weights_full_;
  const uint32_t batch_full_;
  const uint32_t empty_;
  const uint32_t data_;
  const int stages_;
  const int weight_bytes_;
  const int stage_bytes_;
  // The next stage, and the parity of its phase.
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace dorad::kernels
