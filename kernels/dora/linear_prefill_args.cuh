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
// Costs in rows of one stage's panel, some 2.2 ns each: what a stage takes besides; more of the
// widest panel, whose ring has but three (in many bands it reads x so much less often that it is
// the fastest all the same); what all blocks lose when they meet, while consumers multiply; of two
// clusters that divide a tile, until each has the other's sums.
inline constexpr int kPrefillStageCost = 64;
inline constexpr int kPrefillWideCost = 44;
inline constexpr int kPrefillFewBands = 4;
inline constexpr int kPrefillMeetingCost = 500;
inline constexpr int kPrefillExchangeCost = 2000;

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
  // Two clusters have a piece of K each of every tile, at most one each. Else a tile is one's.
  bool divides;
  int32_t meeting_cost = kPrefillMeetingCost;  // tests have others: small batches take all ways
  float* given;                                // kPrefillGivenBytes; unused unless they divide
  float* shares;  // kPrefillShareBytes for each panel and slice; nullptr: no slices
  int32_t exchange_cost = kPrefillExchangeCost;
};

// Of a stage with a panel of that many rows.
__host__ __device__ inline int StageCost(const PrefillArgs& args, int columns) {
  const bool is_wide = columns > 192 && args.bands <= kPrefillFewBands;
  return columns + kPrefillStageCost + (is_wide ? kPrefillWideCost : 0);
}

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
  static constexpr int kRegistersProducer = kN > 192 ? 56 : 104;
  static constexpr int kRegistersConsumer = kN > 192 ? 224 : 200;
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

// What clusters are dealt: tiles, or pieces of them.
__device__ inline int TileItems(const PrefillArgs& args) {
  return (args.divides ? 2 : 1) * args.tile_bands * args.tile_panels;
}

// Slices of K that clusters of their own shrink, or 1. With few panels of A most clusters would
// wait for those that have one. The order of the sums is the same. tile_columns: rows of W.
__device__ inline int ShrinkSlices(const PrefillArgs& args, int panels, int clusters,
                                   int tile_columns) {
  const int slices = CeilDiv(args.plan.chunks, args.plan.a_chunks);
  if (args.shares == nullptr || panels == 0 || panels > kPrefillSlicedPanels) return 1;
  const int column = StageCost(args, kPrefillShrinkRows);
  const int panel = args.plan.chunks * column;
  const int item = args.plan.chunks * StageCost(args, tile_columns) / (args.divides ? 2 : 1);
  const int items = TileItems(args);
  // Of the first cluster, and of the first one that has a panel less.
  const int most = CeilDiv(panels, clusters);
  const int least = panels / clusters;
  const int first = most * panel + (CeilDiv(panels + items, clusters) - most) * item;
  const int other =
      least * panel + (CeilDiv(panels + items - panels % clusters, clusters) - least) * item;
  const int whole = first > other ? first : other;
  const int sliced = CeilDiv(panels * slices, clusters) * args.plan.a_chunks * column +
                     args.meeting_cost + CeilDiv(items, clusters) * item;
  return sliced < whole ? slices : 1;
}

}  // namespace dorad::kernels
