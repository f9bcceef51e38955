// The producers of the kernel behind DoraLinearPrefill: one thread fetches panels of weights and
// factors, one warp fetches rows of x and h. Part of linear_prefill_kernel.cuh.
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
__device__ void PrefillBlock<kN>::ProduceWeights(const CUtensorMap* w_map) {
  constexpr int kHalf = kN / 2;
  const int first_tile = ForEachShrink([&](const Panel& panel, int slice) {
    const CUtensorMap* map = Acquired(panel.segment, panel.part, 0);
    // Rows beyond the last box keep old contents: nobody reads their sums.
    const int rows = tables_.rank[panel.part][panel.segment] - panel.column;
    const int boxes = min(ShrinkRing::kBoxes, CeilDivide(rows, kLinearBoxRows));
    const int end = ShrinkEnd(slice);
#pragma unroll 1
    for (int chunk = ShrinkBegin(slice); chunk < end; ++chunk) {
      ProduceBoxes<ShrinkRing>(map, chunk, panel.column, boxes);
    }
  });
  LeaveShrink();
  ForEachTile(first_tile, [&](int band, int panel) {
    const int row = panel * kN;
#pragma unroll 1
    for (int split = 0; split < args_.plan.splits; ++split) {
      const int end = FirstChunk(split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
        WaitEmpty<TileRing>();
        BarrierArriveExpect(Full<TileRing>(), kN * 2 * kLinearStageK);
        CopyTensorBoxToBlocks(
            Stage<TileRing>() + Config::kBatchBytes + BlockRank() * (kHalf * 2 * kLinearStageK),
            w_map, chunk * kLinearStageK, row + BlockRank() * kHalf, Full<TileRing>(), kBothBlocks);
        Advance<TileRing>();
      }
      ForEachRankRange(band, panel, split, [&](int segment, int part, int first, int end) {
        const CUtensorMap* map = Acquired(segment, part, 1);
        // Rows of other parts are out of bounds: zero.
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
          ProduceBoxes<TileRing>(map, chunk, row - args_.part_begin[part], TileRing::kBoxes);
        }
      });
    }
  });
}

template <int kN>
__device__ void PrefillBlock<kN>::ProduceBatch(const CUtensorMap* x_map, const CUtensorMap* h_map) {
  WaitForPrevious();
  const int first_tile = ForEachShrink([&](const Panel& panel, int slice) {
    const int end = ShrinkEnd(slice);
#pragma unroll 1
    for (int chunk = ShrinkBegin(slice); chunk < end; ++chunk) {
      ProduceBox<ShrinkRing>(x_map, chunk * kLinearStageK, FirstRow(panel.band));
    }
  });
  LeaveShrink();
  bool h_ready = false;
  ForEachTile(first_tile, [&](int band, int panel) {
#pragma unroll 1
    for (int split = 0; split < args_.plan.splits; ++split) {
      const int end = FirstChunk(split + 1);
#pragma unroll 1
      for (int chunk = FirstChunk(split); chunk < end; ++chunk) {
        ProduceBox<TileRing>(x_map, chunk * kLinearStageK, FirstRow(band));
      }
      ForEachRankRange(band, panel, split, [&](int, int part, int first, int end) {
        if (!h_ready) WaitForH();
        h_ready = true;
#pragma unroll 1
        for (int chunk = first; chunk < end; ++chunk) {
          ProduceBox<TileRing>(h_map, part * args_.ldh + chunk * kLinearStageK, FirstRow(band));
        }
      });
    }
  });
  if (tables_.panels == 0) return;
  if (!h_ready) WaitForH();
  // The last block to come here leaves the counters as it found them.
  if (Lane() == 0 && atomicAdd(&args_.counters->left, 1) == gridDim.x - 1) {
    *args_.counters = PrefillCounters();
  }
}

template <int kN>
__device__ void PrefillBlock<kN>::LeaveShrink() {
#pragma unroll 1
  for (int i = 0; i < ShrinkRing::kStages; ++i) {
    WaitEmpty<ShrinkRing>();
    Advance<ShrinkRing>();
  }
  stage_ = 0;
  parity_ = 0;
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
template <typename Ring>
__device__ void PrefillBlock<kN>::ProduceBoxes(const CUtensorMap* map, int chunk, int row,
                                               int boxes) {
  WaitEmpty<Ring>();
  BarrierArriveExpect(Full<Ring>(), boxes * Config::kBoxBytes);
#pragma unroll 1
  for (int box = BlockRank(); box < boxes; box += 2) {
    CopyTensorBoxToBlocks(Stage<Ring>() + Config::kBatchBytes + box * Config::kBoxBytes, map,
                          chunk * kLinearStageK, row + box * kLinearBoxRows, Full<Ring>(),
                          kBothBlocks);
  }
  Advance<Ring>();
}

template <int kN>
template <typename Ring>
__device__ void PrefillBlock<kN>::ProduceBox(const CUtensorMap* map, int column, int row) {
  WaitEmpty<Ring>();
  __syncwarp();  // no lane may miss a phase
  if (Lane() == 0) {
    BarrierArriveExpect(Full<Ring>(), Config::kBatchBytes);
    CopyTensorBox(Stage<Ring>(), map, column, row, Full<Ring>());
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
