// Every GPU from compute capability 8.0 on, behind the seam of kernels that are built for more than
// one instruction set: warps fetch by asynchronous copies and multiply by mma.m16n8k16. The members
// are those of kernels/isa/sm90/isa.cuh.
#pragma once

#include <cstdint>

#include "kernels/isa/barrier.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/mma/matrix.h"
#include "kernels/isa/mma/mma.cuh"

namespace dorad::kernels {

// Four warps divide a product: kRowWarps of them its rows, 16 for each, and the rest its columns.
template <int kRowWarps_>
struct MmaIsa {
  using Matrix = PlainMatrix;

  static constexpr int kSharedBytes = 99 * 1024;  // the least of all: 8.6, 8.9 and 12.0
  static constexpr bool kHasCopyEngine = false;
  static constexpr bool kHasClusters = false;
  static constexpr bool kMovesRegisters = false;
  static constexpr int kFetchThreads = 32;
  static constexpr int kRowWarps = kRowWarps_;

  __device__ static void Expect(uint32_t, uint32_t) {}
  // Into rows of 128 bytes, whose 16-byte pieces lie as the copy engine's 128-byte swizzle has
  // them.
  __device__ static void Fetch(uint32_t to, const Matrix& from, int column, int row, uint32_t) {
    constexpr int kRows = 4;  // at once: eight lanes a row
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int k = column + lane % 8 * 8;
    const uint32_t rows = k < from.columns ? from.rows : 0;
    const int box_rows = from.box_rows;
    row += lane / 8;
    const __nv_bfloat16* data = from.data + static_cast<int64_t>(row) * from.ld + k;
    const int64_t step = int64_t{kRows} * from.ld;
    to += lane / 8 * 128 + ((lane ^ lane / 8) % 8 << 4);
#pragma unroll 4
    for (int r = lane / 8; r < box_rows; r += kRows) {
      const bool valid = static_cast<uint32_t>(row) < rows;
      CopyAsync16(to, valid ? data : from.data, valid);
      row += kRows;
      data += step;
      to = (to + kRows * 128) ^ 64;  // the swizzle of the row four further on
    }
  }
  __device__ static void Fetch(uint32_t to, const Matrix* from, int column, int row,
                               uint32_t barrier) {
    Fetch(to, *from, column, row, barrier);
  }
  template <typename From>
  __device__ static void FetchOnce(uint32_t to, const From& from, int column, int row,
                                   uint32_t barrier) {
    Fetch(to, from, column, row, barrier);
  }
  __device__ static void Complete(uint32_t barrier) {
    BarrierHoldForCopies(barrier);
    Skip(barrier);
  }
  __device__ static void Skip(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) BarrierArrive(barrier);
  }

  __device__ static void Begin(bool) {}
  __device__ static uint32_t Tile(uint32_t shared_address) { return shared_address; }
  // D[16 kRowWarps, kN] += A[16 kRowWarps, 64] B[kN, 64]ᵀ, of Tiles. Each warp has D's elements of
  // its rows and columns as wgmma has those of 16 rows.
  template <int kN>
  __device__ static void Multiply(float (&d)[kN * kRowWarps / 8], uint32_t a_tile,
                                  uint32_t b_tile) {
    constexpr int kColumns = kN * kRowWarps / 4;  // of a warp
    static_assert(kColumns % 16 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % 4);
    // Rows of both tiles begin at multiples of 8, so that a lane's swizzle is always the same.
    const uint32_t a = a_tile + (warp % kRowWarps * 16 + lane % 16) * 128;
    const uint32_t b = b_tile + (warp / kRowWarps * kColumns + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[4];
      LoadMatrices(rows, a + ((2 * step + lane / 16) ^ lane % 8) * 16);
      const uint32_t column = ((2 * step + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t columns[4];
        LoadMatrices(columns, b + i * 16 * 128 + column);
        MmaStep(&d[8 * i], rows, columns[0], columns[1]);
        MmaStep(&d[8 * i + 4], rows, columns[2], columns[3]);
      }
    }
  }
  // The same with a B of 64 rows of K, which run along N in blocks of 64 columns at a distance of
  // `block_bytes`. For warps that have whole rows of D.
  template <int kN>
  __device__ static void MultiplyByK(float (&d)[kN / 2], uint32_t a_tile, uint32_t b_tile,
                                     uint32_t block_bytes) {
    static_assert(kRowWarps == 4 && kN % 16 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % 4);
    const uint32_t a = a_tile + (warp * 16 + lane % 16) * 128;
    const uint32_t b = b_tile + lane % 16 * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[4];
      LoadMatrices(rows, a + ((2 * step + lane / 16) ^ lane % 8) * 16);
#pragma unroll
      for (int i = 0; i < kN / 16; ++i) {
        uint32_t columns[4];
        LoadMatricesTransposed(columns, b + i / 4 * block_bytes + step * 16 * 128 +
                                            ((i % 4 * 2 + lane / 16) ^ lane % 8) * 16);
        MmaStep(&d[8 * i], rows, columns[0], columns[1]);
        MmaStep(&d[8 * i + 4], rows, columns[2], columns[3]);
      }
    }
  }
  __device__ static void End() { __syncwarp(); }

 protected:
  __device__ static void MmaStep(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma(*reinterpret_cast<float(*)[4]>(d), a, b0, b1);
  }
};

}  // namespace dorad::kernels
