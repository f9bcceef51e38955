// Hopper (sm_90a) behind the seam of kernels that are built for more than one instruction set: one
// thread fetches boxes by the copy engine, warpgroups multiply by wgmma. kernels/isa/mma/isa.cuh
// has the same members for all other GPUs.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/sm90/copy.cuh"
#include "kernels/isa/sm90/wgmma.cuh"

namespace dorad::kernels {

struct Sm90Isa {
  using Matrix = CUtensorMap;  // what boxes are fetched of

  static constexpr int kSharedBytes = 227 * 1024 - 256;  // of a block, static and dynamic
  static constexpr bool kHasCopyEngine = true;
  static constexpr bool kHasClusters = true;
  static constexpr bool kMovesRegisters = true;
  static constexpr int kFetchThreads = 1;  // of a warp that fetches
  static constexpr int kRowWarps = 4;  // of a group of four warps: 16 rows of a product for each

  // A stage: Expect, then the boxes, then Complete; Skip: a stage without any. The fetching
  // threads.
  __device__ static void Expect(uint32_t barrier, uint32_t bytes) {
    BarrierArriveExpect(barrier, bytes);
  }
  __device__ static void Fetch(uint32_t to, const Matrix* from, int column, int row,
                               uint32_t barrier) {
    CopyTensorBox(to, from, column, row, barrier);
  }
  // For data that is read once.
  __device__ static void FetchOnce(uint32_t to, const Matrix* from, int column, int row,
                                   uint32_t barrier) {
    CopyTensorBoxOnce(to, from, column, row, barrier);
  }
  __device__ static void Complete(uint32_t) {}
  __device__ static void Skip(uint32_t barrier) { BarrierArrive(barrier); }

  // Products of tiles with 64 columns of K, between Begin and End. copied: threads wrote tiles.
  __device__ static void Begin(bool copied) {
    if (copied) FenceProxyAsync();
    WgmmaFence();
  }
  __device__ static uint64_t Tile(uint32_t shared_address) { return WgmmaTile(shared_address); }
  // D[64, kN] += A[64, 64] B[kN, 64]ᵀ, of Tiles.
  template <int kN>
  __device__ static void Multiply(float (&d)[kN / 2], uint64_t a_tile, uint64_t b_tile) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Wgmma<kN>(d, a_tile + 2 * step, b_tile + 2 * step, 1);
    }
  }
  __device__ static void End() {
    WgmmaCommit();
    WgmmaWait<0>();
  }
};

}  // namespace dorad::kernels
