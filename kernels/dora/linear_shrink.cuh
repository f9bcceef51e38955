// h = s · (A x) for all adapters of a batch, computed by the blocks of a projection before they
// need it; linear_consume.cuh does the products.
//
// Boxes of kLinearBoxRows rows of A, of all parts and segments, are distributed evenly over teams
// of kLinearSlices blocks, a slice of K for each. A block takes a few boxes at once, so that x is
// fetched once for them, and stores their sums in device memory. When all blocks have done so, each
// adds the slices of some of h, in the order of K.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_tables.cuh"

namespace dorad::kernels {

// Boxes that a block takes at once.
template <int kMaxBoxes>
struct ShrinkGroup {
  int boxes = 0;
  LinearBox box[kMaxBoxes];
  int first_tile = 0;  // of 64 rows of the batch, of all boxes' segments
  int last_tile = 0;
};

// f(group) for the boxes of this block's team: the same in all of its blocks and their roles.
template <int kMaxBoxes, typename F>
__device__ inline void ForEachGroup(const LinearArgs& args, const LinearTables& tables, F f) {
  const int end = tables.share[1];
  ShrinkGroup<kMaxBoxes> group;
#pragma unroll 1
  for (int next = tables.share[0]; next < end; next += kMaxBoxes) {
    group.boxes = min(kMaxBoxes, end - next);
#pragma unroll
    for (int i = 0; i < kMaxBoxes; ++i) {
      if (i >= group.boxes) break;
      group.box[i] = OwnBox(args, tables, next + i);
      const int segment = group.box[i].segment;
      const int first_tile = tables.begin[segment] / 64;
      const int last_tile = (tables.end[segment] - 1) / 64;
      group.first_tile = i == 0 ? first_tile : min(group.first_tile, first_tile);
      group.last_tile = i == 0 ? last_tile : max(group.last_tile, last_tile);
    }
    f(group);
  }
}

// A slice's sums of a row of the batch, by its number in all of it.
__device__ inline float* ShareOf(const LinearArgs& args, int part, int row, int slice) {
  const int64_t line = static_cast<int64_t>(part) * args.p.rows + row;
  return args.shares + (line * kLinearSlices + slice) * args.ldh;
}

// Stores the sums of a box and 16 rows of the batch from `batch_row` on. One warp, with kBlocks
// blocks of 8 columns in the tensor cores' layout: the box's are those from `first` on, as far as
// they are the warp's.
template <int kBlocks>
__device__ inline void StoreShare(const LinearArgs& args, const LinearTables& tables, int first_row,
                                  const float (&sums)[4 * kBlocks], int first, int batch_row,
                                  const LinearBox& box) {
  const int segment = box.segment;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = batch_row + lane / 4 + 8 * j;
    if (row < tables.begin[segment] || row >= tables.end[segment]) continue;
    float* to = ShareOf(args, box.part, first_row + row, blockIdx.x % kLinearSlices);
#pragma unroll
    for (int i = 0; i < kLinearBoxRows / 8; ++i) {
      const int column = box.row + 8 * i + 2 * (lane % 4);
      if (first + i < 0 || first + i >= kBlocks) continue;
      if (column >= tables.rank[box.part][segment]) continue;
      *reinterpret_cast<float2*>(to + column) =
          make_float2(sums[4 * (first + i) + 2 * j], sums[4 * (first + i) + 2 * j + 1]);
    }
  }
}

// Adds up this warp's part of h, kAtOnce slices at once: each round costs a round trip to L2.
// `warp` of `warps` of all blocks; all shares are done.
template <int kAtOnce>
__device__ inline void AddShares(const LinearArgs& args, const LinearTables& tables,
                                 const BlockRows& own, int warp, int warps) {
  constexpr int kColumns = 4 * 32;  // of one row of the batch
  const int rows = own.count;
  const int columns = tables.most_boxes * kLinearBoxRows;
  int row = warp;  // no division: it would take as long as the sums
#pragma unroll 1
  for (int first = 0; first < columns; first += kColumns) {
    const int column = first + 4 * static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int part = 0; part < args.p.shape.parts; ++part) {
#pragma unroll 1
      for (; row < rows; row += warps) {
        const int segment = SegmentOf(tables, row);
        if (column >= tables.rank[part][segment]) continue;
        const float scale =
            args.p.table.factors[ModuleIndex(args, tables.slot[segment], part)].scale;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int slice = 0; slice < kLinearSlices; slice += kAtOnce) {
          float4 values[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            values[i] = __ldcg(reinterpret_cast<const float4*>(
                ShareOf(args, part, own.first + row, slice + i) + column));
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            sum.x += values[i].x;
            sum.y += values[i].y;
            sum.z += values[i].z;
            sum.w += values[i].w;
          }
        }
        auto* h = reinterpret_cast<__nv_bfloat162*>(
            args.h + (static_cast<int64_t>(part) * args.p.rows + own.first + row) * args.ldh +
            column);
        h[0] = __floats2bfloat162_rn(scale * sum.x, scale * sum.y);
        h[1] = __floats2bfloat162_rn(scale * sum.z, scale * sum.w);
      }
      row -= rows;
    }
  }
}

}  // namespace dorad::kernels
