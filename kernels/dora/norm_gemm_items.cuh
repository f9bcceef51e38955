// What both forms of the product have in common: tiles, the order in which blocks take them (those
// of all products, with a fixed stride), and the reduction of D, of which each warp has 16 rows as
// mma.m16n8k16 and wgmma leave them. Internal to norm_gemm*.cu.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/common/status.h"
#include "kernels/dora/norm_gemm.h"
#include "kernels/isa/mma/matrix.h"
#include "kernels/isa/mma/mma.cuh"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels::norm {

constexpr int kTileM = 128;
constexpr int kStepK = 64;        // 128 bytes: the width of the swizzle
constexpr int kBoxBytes = 128;    // of a box's row
constexpr int kAlignment = 1024;  // of the swizzle's atoms; made by hand

// tile_n: columns of D of an item. z_by_n: Z is stored [N, M].
template <Reduction kind_, int tile_n_, bool z_by_n_ = false>
struct Tiling {
  static constexpr Reduction kind = kind_;
  static constexpr int tile_n = tile_n_;
  static constexpr bool z_by_n = z_by_n_;
  // Y as [K, N]: N is contiguous.
  static constexpr bool y_by_k = kind == Reduction::kSquare;
};

struct Problem {
  float* partial;
  float scale;
  uint32_t m;
  uint32_t n;
  uint32_t tiles_n;
  uint32_t splits;
  uint32_t steps;         // over K
  uint32_t period_steps;  // of X
  uint32_t first_item;
};

// Passed by value: a launch needs no table in memory. Map: what the instruction set fetches from.
template <typename Map>
struct Params {
  struct Maps {
    Map x;
    Map y;
    Map z;
  };
  Maps maps[kMostGemms];
  Problem problems[kMostGemms];
  int32_t count;
  uint32_t items;  // tile of columns, split, tile of rows
};

// A CTA's next unit of work.
struct Item {
  int32_t problem;
  uint32_t m;
  uint32_t n;
  uint32_t split;
  uint32_t partial;  // row of the partial sums
  uint32_t step_begin;
  uint32_t step_end;
};

template <typename C, typename Map>
__device__ inline Item ItemOf(const Params<Map>& p, uint32_t index) {
  int32_t i = 0;
  while (i + 1 < p.count && index >= p.problems[i + 1].first_item) ++i;
  const Problem& problem = p.problems[i];
  index -= problem.first_item;
  const uint32_t tile_n = index % problem.tiles_n;
  const uint32_t rest = index / problem.tiles_n;
  Item item;
  item.problem = i;
  item.split = rest % problem.splits;
  item.m = rest / problem.splits * kTileM;
  item.n = tile_n * C::tile_n;
  item.partial = tile_n * problem.splits + item.split;
  item.step_begin = item.split * problem.steps / problem.splits;
  item.step_end = (item.split + 1) * problem.steps / problem.splits;
  return item;
}

// A pair of z and its two places of D.
template <Reduction kind>
__device__ void Reduce(uint32_t pair, float d0, float d1, float scale, float& sum0, float& sum1) {
  const float z0 = __uint_as_float(pair << 16);
  const float z1 = __uint_as_float(pair & 0xFFFF0000u);
  if constexpr (kind == Reduction::kSquare) {
    const float t0 = fmaf(scale, d0, z0);
    const float t1 = fmaf(scale, d1, z1);
    sum0 = fmaf(t0, t0, sum0);
    sum1 = fmaf(t1, t1, sum1);
  } else {
    sum0 = fmaf(z0, d0, sum0);
    sum1 = fmaf(z1, d1, sum1);
  }
}

// A lane's address in its row of Z for ldmatrix: of a warp's 16 rows of D and 16 columns, the four
// quarters (rows first) belong to eight lanes each.
template <typename C>
class ZAddress {
 public:
  __device__ ZAddress(uint32_t z, int group, int warp, int lane) {
    const int low = lane / 8 % 2;  // of the two groups of 8 rows of D
    const int high = lane / 16;    // of the two groups of 8 columns
    swizzle_ = lane % 8;
    if constexpr (C::z_by_n) {
      at_ = z + group * C::z_group_bytes + (high * 8 + lane % 8) * kBoxBytes +
            ((warp * 2 + low) ^ swizzle_) * 16;
    } else {
      at_ = z + (group * 64 + warp * 16 + low * 8 + lane % 8) * kBoxBytes;
      high_ = high;
    }
  }
  // Columns [16·c, 16·c + 16) of a box.
  __device__ uint32_t Of(int box, int c) const {
    const uint32_t at = at_ + box * C::z_box_bytes;
    if constexpr (C::z_by_n) return at + c * 16 * kBoxBytes;
    return at + ((2 * c + high_) ^ swizzle_) * 16;
  }

 private:
  uint32_t at_;
  int swizzle_;
  int high_ = 0;
};

// D's elements of 64 columns from `box` on, and their place in Z: adds to two sums for each of a
// lane's two rows, for shorter chains.
template <typename C, int kSize>
__device__ inline void ReduceBox(const ZAddress<C>& z_address, int box, const float (&d)[kSize],
                                 float scale, float (&sum)[2][2]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {  // 16 columns
    uint32_t pairs[4];
    if constexpr (C::z_by_n) {
      LoadMatricesTransposed(pairs, z_address.Of(box, c));
    } else {
      LoadMatrices(pairs, z_address.Of(box, c));
    }
    const int at = (box * 8 + 2 * c) * 4;
    Reduce<C::kind>(pairs[0], d[at], d[at + 1], scale, sum[0][0], sum[0][1]);
    Reduce<C::kind>(pairs[1], d[at + 2], d[at + 3], scale, sum[1][0], sum[1][1]);
    Reduce<C::kind>(pairs[2], d[at + 4], d[at + 5], scale, sum[0][0], sum[0][1]);
    Reduce<C::kind>(pairs[3], d[at + 6], d[at + 7], scale, sum[1][0], sum[1][1]);
  }
}

// The totals of a lane's rows, `low` and low + 8, to a row of the partial sums. For a warp.
__device__ inline void StoreSums(const float (&sum)[2][2], uint32_t low, uint32_t rows, int lane,
                                 float* to) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half][0] + sum[half][1];
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    const uint32_t m = low + 8 * half;
    if (lane % 4 == 0 && m < rows) to[m] = total;
  }
}

// D itself, columns from `first` on.
template <int kSize>
__device__ inline void StoreTile(const float (&d)[kSize], uint32_t low, uint32_t rows,
                                 uint32_t first, uint32_t columns, int lane, float* to) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const uint32_t column = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const uint32_t m = low + i / 2 % 2 * 8;
    if (m < rows && column < columns) to[static_cast<int64_t>(m) * columns + column] = d[i];
  }
}

inline int64_t TilesOf(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

inline int64_t ColumnsOf(const RowGemm& gemm) {
  return gemm.reduction == Reduction::kSquare ? gemm.y.columns : gemm.y.rows;
}

// Rows of the boxes that are fetched of each matrix.
struct BoxRows {
  int x, y, z;
};

// The products for the device. C: a Tiling.
template <typename C, typename Map>
cudaError_t Describe(const RowGemm* gemms, int count, BoxRows box_rows, Params<Map>* params) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  const auto encode = [](const Matrix& matrix, int rows, Map* map) {
    return EncodeMatrix(matrix.data, matrix.rows, matrix.columns, matrix.ld, rows, map);
  };
  params->count = count;
  int64_t items = 0;
  for (int i = 0; i < count; ++i) {
    const RowGemm& gemm = gemms[i];
    if (gemm.x.rows > kMost || ColumnsOf(gemm) > kMost || gemm.k > kMost) {
      return cudaErrorInvalidValue;
    }
    Problem& problem = params->problems[i];
    auto& maps = params->maps[i];
    problem.partial = gemm.partial;
    problem.scale = gemm.scale;
    problem.m = static_cast<uint32_t>(gemm.x.rows);
    problem.n = static_cast<uint32_t>(ColumnsOf(gemm));
    problem.tiles_n = static_cast<uint32_t>(TilesOf(problem.n, C::tile_n));
    problem.splits = static_cast<uint32_t>(gemm.splits);
    problem.steps = static_cast<uint32_t>(TilesOf(gemm.k, kStepK));
    problem.period_steps =
        gemm.x_period == 0 ? problem.steps : static_cast<uint32_t>(gemm.x_period / kStepK);
    problem.first_item = static_cast<uint32_t>(items);
    items += TilesOf(problem.m, kTileM) * problem.tiles_n * problem.splits;
    if (items > kMost) return cudaErrorInvalidValue;
    DORAD_CUDA_RETURN_IF_ERROR(encode(gemm.x, box_rows.x, &maps.x));
    DORAD_CUDA_RETURN_IF_ERROR(encode(gemm.y, box_rows.y, &maps.y));
    if (C::kind != Reduction::kStore) {
      DORAD_CUDA_RETURN_IF_ERROR(encode(gemm.z, box_rows.z, &maps.z));
    }
  }
  params->items = static_cast<uint32_t>(items);
  return cudaSuccess;
}

}  // namespace dorad::kernels::norm
