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
  static constexpr int kFetchWarps = 1;    // that share what is much
  // Those of a group that divide a product's rows, and blocks of 16 rows for each.
  static constexpr int kGroupWarps = 4;
  static constexpr int kRowWarps = 4;
  static constexpr int kRowBlocks = 1;

  // A stage: Expect, then the boxes, then Complete; Skip: a stage without any. The fetching
  // threads.
  __device__ static void Expect(uint32_t barrier, uint32_t bytes) {
    BarrierArriveExpect(barrier, bytes);
  }
  // Boxes at some rows of a matrix.
  struct Rows {
    const Matrix* from;
    int32_t row;
  };
  __device__ static Rows RowsOf(const Matrix* from, int row, int /*box_rows*/, int /*share*/ = 0,
                                int /*shares*/ = 1) {
    return {from, row};
  }
  __device__ static void Fetch(uint32_t to, const Rows& rows, int column, uint32_t barrier) {
    CopyTensorBox(to, rows.from, column, rows.row, barrier);
  }
  // For data that is read once.
  template <int kFours>
  __device__ static void FetchOnce(uint32_t to, const Rows& rows, int column, uint32_t barrier) {
    CopyTensorBoxBy(EvictFirst(), to, rows.from, column, rows.row, barrier);
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
