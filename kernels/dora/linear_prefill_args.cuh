// The arguments of the kernel behind DoraLinearPrefill, its sizes, and what all roles of a block
// know about the batch. Part of linear_prefill_kernel.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill.h"

namespace dorad::kernels {

inline constexpr int kPrefillTileRows = 128;  // of the batch, of a block
inline constexpr int kPrefillBandRows = 2 * kPrefillTileRows;
inline constexpr int kPrefillThreads = 384;

// Waiting counters at the head of the workspace; zero between launches.
struct PrefillCounters {
  uint32_t shrunk;  // blocks done with their panels of the shrink
  uint32_t left;    // blocks that need the one above no longer
};
static_assert(sizeof(PrefillCounters) <= kDoraLinearSignalBytes);

struct PrefillArgs {
  DoraLinearPrefillParams p;
  LinearPlan plan;                              // DoraLinear's: for the order of sums
  int32_t part_begin[kDoraLinearMaxParts + 1];  // in rows of W
  int32_t bands;
  int32_t panels;
  int32_t group;  // bands whose tiles are walked together
  int32_t ldh;    // max_rank, rounded up to kLinearStageK
  PrefillCounters* counters;
  __nv_bfloat16* h;  // [rows, parts, ldh]
};

// kN: rows of W in a panel.
template <int kN>
struct PrefillConfig {
  static constexpr int kShrinkN = 96;  // rows of A in a panel
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
  static constexpr int kRegistersProducer = 56;
  static constexpr int kRegistersConsumer = 224;
  // What the block began with is what there is: more is waited for, without end.
  static constexpr int kRegistersAtStart = 65536 / kPrefillThreads / 8 * 8;
  static_assert(kRegistersProducer + 2 * kRegistersConsumer <= 3 * kRegistersAtStart);
};

// What all roles of a block know about the batch.
struct PrefillTables {
  int32_t slot[kPrefillMaxSegments];
  int32_t begin[kPrefillMaxSegments + 1];                  // the last one in use: rows
  int16_t rank[kDoraLinearMaxParts][kPrefillMaxSegments];  // rounded up to kLinearStageK
  int32_t adapted;                                         // whether any rank is not 0
};

// Where a part's factors are in the table.
__device__ inline int64_t FactorsAt(const PrefillArgs& args, int slot, int part) {
  return static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part;
}

__device__ inline const DoraFactors* FactorsOf(const PrefillArgs& args, int slot, int part) {
  return args.p.table.factors + FactorsAt(args, slot, part);
}

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const PrefillArgs& args, int slot, int part) {
  return args.p.maps + 2 * FactorsAt(args, slot, part);
}

// Whole block. `tables.adapted` is 0 and visible on entry.
__device__ inline void FillTables(const PrefillArgs& args, PrefillTables& tables) {
  for (int i = threadIdx.x; i < args.p.num_segments; i += kPrefillThreads) {
    const RowSegment segment = args.p.segments[i];
    tables.slot[i] = segment.slot;
    tables.begin[i] = segment.begin;
    for (int part = 0; part < args.p.shape.parts; ++part) {
      const int rank = segment.slot < 0 ? 0 : FactorsOf(args, segment.slot, part)->rank;
      tables.rank[part][i] =
          static_cast<int16_t>((rank + kLinearStageK - 1) / kLinearStageK * kLinearStageK);
      if (rank != 0) tables.adapted = 1;
    }
  }
  if (threadIdx.x == 0) tables.begin[args.p.num_segments] = args.p.rows;
}

}  // namespace dorad::kernels
