// The producers of Hopper's kernel behind DoraLinearPrefill: one thread fetches panels of weights
// and factors, one warp fetches rows of x and h. Part of linear_prefill_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_prefill_block.cuh"
#include "kernels/isa/dependent_launch.cuh"
#include "kernels/isa/memory.cuh"
#include "kernels/isa/sm90/copy.cuh"

namespace dorad::kernels {

template <int kN>
template <bool kSharesRows>
__device__ void PrefillBlock<kN>::ProduceWeights(const CUtensorMap* w_map) {
  constexpr int kHalf = kN / 2;
  constexpr int kHalfBytes = kHalf * 2 * kLinearStageK;
  const int first_tile = ForEachShrink([&](const Panel& panel, int slice) {
    const CUtensorMap* map = Acquired(panel.segment, panel.part, 0);
    // Rows beyond the last box keep old contents: nobody reads their sums.
    const int rows = tables_.rank[panel.part][panel.segment] - panel.column;
    const int boxes = min(ShrinkRing::kBoxes, CeilDiv(rows, kLinearBoxRows));
    const int end = ShrinkEnd(slice);
#pragma unroll 1
    for (int chunk = ShrinkBegin(slice); chunk < end; ++chunk) {
      ProduceBoxes<ShrinkRing, true>(map, chunk, panel.column, boxes);
    }
  });
  LeaveShrink();
  ForEachTile(first_tile, [&](const Tile& tile) {
    const int row = TileColumn(tile.panel);
#pragma unroll 1
    for (int split = tile.begin; split < tile.end; ++split) {
      const int end = FirstChunk(split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
        WaitEmpty<TileRing>();
        BarrierArriveExpect(Full<TileRing>(), kN * 2 * kLinearStageK);
        const uint32_t to = Stage<TileRing>() + Config::kBatchBytes;
        const int column = chunk * kLinearStageK;
        if constexpr (kSharesRows) {
          CopyTensorBox(to, w_map, column, row, Full<TileRing>());
          CopyTensorBox(to + kHalfBytes, w_map, column, row + kHalf, Full<TileRing>());
        } else {
          CopyTensorBoxToBlocks(to + BlockRank() * kHalfBytes, w_map, column,
                                row + BlockRank() * kHalf, Full<TileRing>(), kBothBlocks);
        }
        Advance<TileRing>();
      }
      ForEachRankRange(tile, split, [&](int segment, int part, int first, int end) {
        const CUtensorMap* map = Acquired(segment, part, 1);
        // Rows of other parts are out of bounds: zero.
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
          ProduceBoxes<TileRing, !kSharesRows>(map, chunk, row - args_.part_begin[part],
                                               TileRing::kBoxes);
        }
      });
    }
  });
}

template <int kN>
template <bool kSharesRows>
__device__ void PrefillBlock<kN>::ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* h_map) {
  constexpr int kBoxRows = kSharesRows ? kPrefillTileRows / 2 : kPrefillTileRows;
  WaitForPrevious();
  const int first_tile = ForEachShrink([&](const Panel& panel, int slice) {
    const int row = FirstRow(panel.band);
    const int end = ShrinkEnd(slice);
#pragma unroll 1
    for (int chunk = ShrinkBegin(slice); chunk < end; ++chunk) {
      ProduceRows<ShrinkRing, kBoxRows, false>(x_map, chunk * kLinearStageK, row);
    }
  });
  LeaveShrink();
  bool h_ready = false;
  ForEachTile(first_tile, [&](const Tile& tile) {
    const int row = TileRow(tile.band);
#pragma unroll 1
    for (int split = tile.begin; split < tile.end; ++split) {
      const int end = FirstChunk(split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
        ProduceRows<TileRing, kBoxRows, kSharesRows>(x_map, chunk * kLinearStageK, row);
      }
      ForEachRankRange(tile, split, [&](int, int part, int first, int end) {
        if (!h_ready) WaitForH();
        h_ready = true;
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
          ProduceRows<TileRing, kBoxRows, kSharesRows>(
              h_map, part * args_.ldh + chunk * kLinearStageK, row);
        }
      });
    }
  });
  if (tables_.panels == 0) return;
  if (!h_ready) WaitForH();
  // The last block to come here leaves the counters as it found them.
  PrefillCounters* counters = args_.counters;
  if (Lane() == 0 && atomicAdd(&counters->left, 1) == gridDim.x - 1) {
    counters->shares = counters->shrunk = counters->left = 0;
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::LeaveShrink() {
#pragma unroll 1
  for (int i = 0; i < ShrinkRing::kStages; ++i) {
    WaitEmpty<ShrinkRing>();
    Advance<ShrinkRing>();
  }
  at_ = {};
}

template <int kN>
__device__ const CUtensorMap* PrefillBlock<kN>::Acquired(int segment, int part, int factor) {
  const CUtensorMap* map = MapsOf(args_, tables_.slot[segment], part) + factor;
  const uint32_t bit = 1 << (2 * part + factor);
  if ((acquired_[segment] & bit) == 0) {
    AcquireTensorMap(map);
    acquired_[segment] |= bit;
  }
  return map;
}

template <int kN>
template <typename Ring, bool kShared>
__device__ void PrefillBlock<kN>::ProduceBoxes(const CUtensorMap* map, int chunk, int row,
                                               int boxes) {
  WaitEmpty<Ring>();
  BarrierArriveExpect(Full<Ring>(), boxes * Config::kBoxBytes);
#pragma unroll 1
  for (int box = kShared ? BlockRank() : 0; box < boxes; box += kShared ? 2 : 1) {
    const uint32_t to = Stage<Ring>() + Config::kBatchBytes + box * Config::kBoxBytes;
    const int box_row = row + box * kLinearBoxRows;
    if constexpr (kShared) {
      CopyTensorBoxToBlocks(to, map, chunk * kLinearStageK, box_row, Full<Ring>(), kBothBlocks);
    } else {
      CopyTensorBox(to, map, chunk * kLinearStageK, box_row, Full<Ring>());
    }
  }
  Advance<Ring>();
}

template <int kN>
template <typename Ring, int kBoxRows, bool kShared>
__device__ void PrefillBlock<kN>::ProduceRows(const CUtensorMap* map, int column, int row) {
  constexpr int kBoxes = kPrefillTileRows / kBoxRows;
  constexpr int kBytes = Config::kBatchBytes / kBoxes;  // of a box
  static_assert(!kShared || kBoxes == 2);
  WaitEmpty<Ring>();
  __syncwarp();  // no lane may miss a phase
  if (Lane() == 0) {
    BarrierArriveExpect(Full<Ring>(), Config::kBatchBytes);
    if constexpr (kShared) {
      CopyTensorBoxToBlocks(Stage<Ring>() + BlockRank() * kBytes, map, column,
                            row + BlockRank() * kBoxRows, Full<Ring>(), kBothBlocks);
    } else {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        CopyTensorBox(Stage<Ring>() + box * kBytes, map, column, row + box * kBoxRows,
                      Full<Ring>());
      }
    }
  }
  Advance<Ring>();
}

template <int kN>
__device__ void PrefillBlock<kN>::WaitForH() const {
  if (Lane() == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
  __syncwarp();
  FenceProxyAsyncGlobal();
}

}  // namespace dorad::kernels
