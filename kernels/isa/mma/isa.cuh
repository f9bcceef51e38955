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

// kGroupWarps warps divide a product: kRowWarps of them its rows, kRowBlocks blocks of 16 for each,
// and the rest its columns.
template <int kRowWarps_, int kRowBlocks_ = 1, int kGroupWarps_ = 4>
struct MmaIsa {
  using Matrix = PlainMatrix;

  static constexpr int kSharedBytes = 99 * 1024;  // the least of all: 8.6, 8.9 and 12.0
  static constexpr bool kHasCopyEngine = false;
  static constexpr bool kHasClusters = false;
  static constexpr bool kMovesRegisters = false;
  static constexpr int kFetchThreads = 32;
  static constexpr int kFetchWarps = 2;
  static constexpr int kGroupWarps = kGroupWarps_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kRowBlocks = kRowBlocks_;

  __device__ static void Expect(uint32_t, uint32_t) {}
  // What a lane fetches of boxes of some rows, four rows at a time: its warp's share of them.
  struct Rows {
    const __nv_bfloat16* data;  // its first row, at its column of the matrix's first 64
    int32_t step;               // elements between two of its rows
    int32_t columns;            // of the matrix, from its own on
    uint64_t valid;             // a bit for each of its rows
    uint32_t offset;            // in the box
    int32_t fours;              // of its rows
  };
  // A share is a multiple of 16 rows.
  __device__ static Rows RowsOf(const Matrix& from, int row, int box_rows, int share = 0,
                                int shares = 1) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int count = box_rows / shares;
    const int first = share * count + lane / 8;
    const int k = lane % 8 * 8;
    Rows rows = {from.data + static_cast<int64_t>(row + first) * from.ld + k,
                 4 * from.ld,
                 from.columns - k,
                 0,
                 static_cast<uint32_t>(first * 128 + ((lane ^ lane / 8) % 8 << 4)),
                 count / 16};
    for (int i = 0; i < count / 4; ++i) {
      const auto at = static_cast<uint32_t>(row + first + 4 * i);
      if (at < static_cast<uint32_t>(from.rows)) rows.valid |= uint64_t{1} << i;
    }
    return rows;
  }
  __device__ static Rows RowsOf(const Matrix* from, int row, int box_rows, int share = 0,
                                int shares = 1) {
    return RowsOf(*from, row, box_rows, share, shares);
  }
  // Into rows of 128 bytes, whose 16-byte pieces lie as the copy engine's 128-byte swizzle has
  // them. kFours: of the rows, if it is known.
  template <int kFours = 0>
  __device__ static void Fetch(uint32_t to, const Rows& rows, int column, uint32_t) {
    uint64_t valid = column < rows.columns ? rows.valid : 0;
    const __nv_bfloat16* from = rows.data + column;
    to += rows.offset;
    const int fours = kFours > 0 ? kFours : rows.fours;
#pragma unroll(kFours > 0 ? kFours : 1)
    for (int four = 0; four < fours; ++four) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The swizzle of the row four further on.
        CopyAsync16((to ^ i % 2 * 64) + i * 4 * 128, from + static_cast<int64_t>(i) * rows.step,
                    (valid >> i & 1) != 0);
      }
      to += 16 * 128;
      from += static_cast<int64_t>(4) * rows.step;
      valid >>= 4;
    }
  }
  template <int kFours>
  __device__ static void FetchOnce(uint32_t to, const Rows& rows, int column, uint32_t barrier) {
    Fetch<kFours>(to, rows, column, barrier);
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
  // D[M, kN] += A[M, 64] B[kN, 64]ᵀ, of Tiles, with M = 16 kRowWarps kRowBlocks. Each warp has D's
  // elements of its rows and columns, block after block, as wgmma has those of 16 rows.
  template <int kN>
  __device__ static void Multiply(float (&d)[kN * kRowWarps * kRowBlocks / (2 * kGroupWarps)],
                                  uint32_t a_tile, uint32_t b_tile) {
    constexpr int kColumns = kN * kRowWarps / kGroupWarps;  // of a warp
    static_assert(kColumns % 16 == 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32 % kGroupWarps);
    // Rows of both tiles begin at multiples of 8, so that a lane's swizzle is always the same.
    const uint32_t a = a_tile + (warp % kRowWarps * 16 * kRowBlocks + lane % 16) * 128;
    const uint32_t b = b_tile + (warp / kRowWarps * kColumns + lane / 16 * 8 + lane % 8) * 128;
    // More at once would cost registers that wide products do not leave.
    [[maybe_unused]] constexpr int kUnroll = kColumns * kRowBlocks > 256 ? 1 : 4;
#pragma unroll kUnroll
    for (int step = 0; step < 4; ++step) {
      uint32_t rows[kRowBlocks][4];
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        LoadMatrices(rows[m], a + m * 16 * 128 + ((2 * step + lane / 16) ^ lane % 8) * 16);
      }
      const uint32_t column = ((2 * step + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
      for (int i = 0; i < kColumns / 16; ++i) {
        uint32_t columns[4];
        LoadMatrices(columns, b + i * 16 * 128 + column);
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          float* to = &d[m * kColumns / 2 + 8 * i];
          MmaStep(to, rows[m], columns[0], columns[1]);
          MmaStep(to + 4, rows[m], columns[2], columns[3]);
        }
      }
    }
  }
  // The same with a B of 64 rows of K, which run along N in blocks of 64 columns at a distance of
  // `block_bytes`. For warps that have whole rows of D.
  template <int kN>
  __device__ static void MultiplyByK(float (&d)[kN / 2], uint32_t a_tile, uint32_t b_tile,
                                     uint32_t block_bytes) {
    static_assert(kRowWarps == 4 && kRowBlocks == 1 && kN % 16 == 0);
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
