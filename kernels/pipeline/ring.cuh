// Rings of stages in shared memory, which some warps fill and others read.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"

namespace dorad::kernels {

// The next stage, and the parity of its barriers' phase: the same sequence in every role of a
// block.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The barriers of stages follow each other in steps of 8 bytes: a stage is full when all of it has
// arrived, and empty when all have read it.
struct Ring : RingPosition {
  uint32_t data;  // of the first stage
  uint32_t full;  // barriers
  uint32_t empty;
  int stages;
  int stage_bytes;

  __device__ Ring(uint32_t data, uint32_t full, uint32_t empty, int stages, int stage_bytes)
      : data(data), full(full), empty(empty), stages(stages), stage_bytes(stage_bytes) {}

  __device__ uint32_t Stage() const { return data + stage * stage_bytes; }
  __device__ uint32_t Full() const { return full + 8 * stage; }
  __device__ uint32_t Empty(int of_stage) const { return empty + 8 * of_stage; }
  __device__ void WaitFull() const { BarrierWait(Full(), parity); }
  __device__ void WaitEmpty() const { BarrierWait(Empty(stage), parity ^ 1); }
  // Whole warp, after its reads.
  __device__ void Release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(Empty(stage));
  }
  __device__ void Advance() { RingPosition::Advance(stages); }
};

}  // namespace dorad::kernels
