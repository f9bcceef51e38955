// The arguments of Hopper's kernel behind DoraLinearPrefill, its sizes, and what all roles of a
// block know about the batch. Part of linear_prefill_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"
#include "kernels/dora/linear_prefill_problem.cuh"

namespace dorad::kernels {

inline constexpr int kPrefillBandRows = 2 * kPrefillTileRows;
inline constexpr int kPrefillThreads = 384;
// Costs in rows of one stage's panel, some 2 ns each: what a multiprocessor can take in bounds a
// stage, and so its rows of the batch cost as much as those of the panel. Consumers do not wait
// while all blocks meet.
inline constexpr int kPrefillStageCost = kPrefillTileRows;
inline constexpr int kPrefillMeetingCost = 500;

// The shrink in slices of K, for batches of few tiles.
inline constexpr int kPrefillShrinkRows = 96;    // of A in a panel
inline constexpr int kPrefillSlicedPanels = 32;  // the most panels of a batch that is sliced
inline constexpr int kPrefillSlicedBands = 8;    // and its most bands
// Of one panel's sums over a slice, for a band.
inline constexpr size_t kPrefillShareBytes = sizeof(float) * kPrefillBandRows * kPrefillShrinkRows;

// Tiles are those of clusters.
struct PrefillArgs : PrefillProblem {
  int32_t bands;  // of the shrink, of kPrefillBandRows
  // The two blocks of a cluster have the same rows of the batch and neighbouring panels of W; else
  // the same panel and neighbouring rows.
  bool shares_rows;
  int32_t meeting_cost = kPrefillMeetingCost;
  float* shares;  // kPrefillShareBytes for each panel and slice; nullptr: no slices
};

// kN: rows of W in a panel.
template <int kN>
struct PrefillConfig {
  static constexpr int kShrinkN = kPrefillShrinkRows;
  static constexpr int kConsumerWarps = 8;
  static constexpr int kBoxBytes = kLinearBoxRows * 2 * kLinearStageK;
  static constexpr int kBatchBytes = kPrefillTileRows * 2 * kLinearStageK;
  // Sums in shared memory: of a warp, 8 columns of its 16 rows, so far apart that 8 such blocks
  // begin in different banks.
  static constexpr int kParkedBlocks = kN / 16;
  static constexpr int kParkedBlockBytes = 32 * 16 + 16;
  static constexpr int kParkedBytes = kParkedBlocks * kParkedBlockBytes;
  static constexpr int kStaticBytes = 8 * 1024;                        // rounded up
  static constexpr int kMostBytes = 227 * 1024 - kStaticBytes - 1024;  // for alignment
  // Stages of the tiles of y; the sums come after them.
  struct TileRing {
    static constexpr int kBoxes = (kN + kLinearBoxRows - 1) / kLinearBoxRows;  // of B
    static constexpr int kStageBytes = kBatchBytes + kBoxes * kBoxBytes;
    static constexpr int kStages = (kMostBytes - kConsumerWarps * kParkedBytes) / kStageBytes;
    static constexpr int kFirst = 0;  // of the barriers
  };
  // And of the shrink, over all of it.
  struct ShrinkRing {
    static constexpr int kBoxes = kShrinkN / kLinearBoxRows;  // of A
    static constexpr int kStageBytes = kBatchBytes + kBoxes * kBoxBytes;
    static constexpr int kStages = kMostBytes / kStageBytes;
    static constexpr int kFirst = TileRing::kStages;
  };
  static constexpr int kBarriers = TileRing::kStages + ShrinkRing::kStages;
  static constexpr int kDynamicBytes = kMostBytes + 1024;
  static constexpr int kRegistersProducer = kN > 192 ? 56 : 120;
  static constexpr int kRegistersConsumer = kN > 192 ? 224 : 192;
  // What the block began with is what there is: more is waited for, without end.
  static constexpr int kRegistersAtStart = 65536 / kPrefillThreads / 8 * 8;
  static_assert(kRegistersProducer + 2 * kRegistersConsumer <= 3 * kRegistersAtStart);
  static constexpr int kAddAtOnce = kN > 192 ? 1 : 4;  // slices of h, as registers allow
};

// What all roles of a block know about the batch.
struct PrefillTables {
  int32_t slot[kPrefillMaxSegments];
  int32_t begin[kPrefillMaxSegments + 1];                  // the last one in use: rows
  int16_t rank[kDoraLinearMaxParts][kPrefillMaxSegments];  // rounded up to kLinearStageK
  uint32_t panels;  // of the shrink, of all bands; 0: no rank
};

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const PrefillArgs& args, int slot, int part) {
  return args.p.maps + 2 * FactorsAt(args, slot, part);
}

// Whole block. `tables.panels` is 0 and visible on entry.
__device__ inline void FillTables(const PrefillArgs& args, PrefillTables& tables) {
  for (int i = threadIdx.x; i < args.p.num_segments; i += kPrefillThreads) {
    const RowSegment segment = args.p.segments[i];
    tables.slot[i] = segment.slot;
    tables.begin[i] = segment.begin;
    const int bands = (segment.end - 1) / kPrefillBandRows - segment.begin / kPrefillBandRows + 1;
    for (int part = 0; part < args.p.shape.parts; ++part) {
      const int rank = segment.slot < 0 ? 0 : FactorsOf(args, segment.slot, part)->rank;
      tables.rank[part][i] = static_cast<int16_t>(RoundUp(rank, kLinearStageK));
      const int panels = CeilDiv(tables.rank[part][i], kPrefillShrinkRows) * bands;
      if (panels > 0) atomicAdd(&tables.panels, static_cast<uint32_t>(panels));
    }
  }
  if (threadIdx.x == 0) tables.begin[args.p.num_segments] = args.p.rows;
}

// Slices of K that clusters of their own shrink, or 1. With few panels of A most clusters would
// wait for those that have one. The order of the sums is the same. tile_columns: rows of W.
__device__ inline int ShrinkSlices(const PrefillArgs& args, int panels, int clusters,
                                   int tile_columns) {
  const int slices = CeilDiv(args.plan.chunks, args.plan.a_chunks);
  if (args.shares == nullptr || panels == 0 || panels > kPrefillSlicedPanels) return 1;
  const int column = kPrefillShrinkRows + kPrefillStageCost;
  const int panel = args.plan.chunks * column;
  const int tile = args.plan.chunks * (tile_columns + kPrefillStageCost);
  const int tiles = args.tile_bands * args.tile_panels;
  // Of the first cluster, and of the first one that has a panel less.
  const int most = CeilDiv(panels, clusters);
  const int least = panels / clusters;
  const int first = most * panel + (CeilDiv(panels + tiles, clusters) - most) * tile;
  const int other =
      least * panel + (CeilDiv(panels + tiles - panels % clusters, clusters) - least) * tile;
  const int whole = first > other ? first : other;
  const int sliced = CeilDiv(panels * slices, clusters) * args.plan.a_chunks * column +
                     args.meeting_cost + CeilDiv(tiles, clusters) * tile;
  return sliced < whole ? slices : 1;
}

}  // namespace dorad::kernels
