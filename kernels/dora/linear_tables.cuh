// A block's tables of the batch's adapters, and loops over them for all roles of a block.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/common/search.cuh"
#include "kernels/dora/linear_args.h"

namespace dorad::kernels {

// A box of A.
struct LinearBox {
  const CUtensorMap* map;
  int16_t segment;
  int16_t part;
  int32_t row;  // of A, the first one
};

struct LinearTables {
  static constexpr int kOwnBoxes = 32;

  int32_t segments;  // at least 1
  // Boxes of kLinearBoxRows rows of A, of all factors: one of each part and segment, by part.
  int32_t boxes;
  int32_t most_boxes;                                           // of one factor
  int32_t share[2];                                             // [first, end) of this block's
  LinearBox own[kOwnBoxes];                                     // the first ones of these
  int16_t first_box[kDoraLinearMaxParts * kDoraLinearMaxRows];  // of each factor
  int32_t slot[kDoraLinearMaxRows];
  int16_t begin[kDoraLinearMaxRows];
  int16_t end[kDoraLinearMaxRows];
  // Rounded up to 8; 0 beyond the segments, up to a multiple of kMostTogether.
  int16_t rank[kDoraLinearMaxParts][kDoraLinearMaxRows];

  static constexpr int kMostTogether = 4;
};

// Rows of the batch that a block has: those of its group, which is blockIdx.y. Blocks of a group
// number them, and themselves, as if there were no other one.
struct BlockRows {
  int first;
  int count;
};
template <typename Isa>
__device__ inline BlockRows RowsOfBlock(const LinearArgs& args) {
  if constexpr (Isa::kHasClusters) {
    return {0, args.p.rows};
  } else {
    const int first = static_cast<int>(blockIdx.y) * args.plan.group_rows;
    return {first, min(args.plan.group_rows, args.p.rows - first)};
  }
}
template <typename Isa>
__device__ inline LinearSignals* SignalsOf(const LinearArgs& args) {
  if constexpr (Isa::kHasClusters) return args.signals;
  return args.signals + blockIdx.y;
}

__device__ inline int64_t ModuleIndex(const LinearArgs& args, int slot, int part) {
  return static_cast<int64_t>(slot) * args.p.table.modules + args.p.first_module + part;
}

// Of A, then B.
__device__ inline const CUtensorMap* MapsOf(const LinearArgs& args, int slot, int part) {
  return args.p.maps + 2 * ModuleIndex(args, slot, part);
}

// What the boxes of A, and those of B, are fetched of.
template <typename Isa>
__device__ inline auto MatrixOfA(const LinearArgs& args, const LinearTables& tables,
                                 const LinearBox& box) {
  if constexpr (Isa::kHasCopyEngine) {
    return box.map;
  } else {
    const DoraFactors& f =
        args.p.table.factors[ModuleIndex(args, tables.slot[box.segment], box.part)];
    return typename Isa::Matrix{f.a, f.rank, args.p.shape.in, args.p.shape.in, kLinearBoxRows};
  }
}
template <typename Isa>
__device__ inline auto MatrixOfB(const LinearArgs& args, int slot, int part) {
  if constexpr (Isa::kHasCopyEngine) {
    return MapsOf(args, slot, part) + 1;
  } else {
    const DoraFactors& f = args.p.table.factors[ModuleIndex(args, slot, part)];
    return typename Isa::Matrix{f.b, args.p.shape.out[part], (f.rank + 7) / 8 * 8, f.ldb,
                                kLinearBoxRows};
  }
}

// The first loads of a thread of FillTables: its segments, kStep apart, and their number.
template <int kEach, int kStep>
struct LinearSegments {
  RowSegment segment[kEach];
  int count;
};

template <int kEach, int kStep>
__device__ inline LinearSegments<kEach, kStep> LoadSegments(const LinearArgs& args) {
  LinearSegments<kEach, kStep> loaded;
  // Loaded before the number of segments is known, to save a wait.
#pragma unroll
  for (int each = 0; each < kEach; ++each) {
    const int i = static_cast<int>(threadIdx.x) + each * kStep;
    loaded.segment[each] = i < args.p.rows ? args.p.segments[i] : RowSegment{-1, 0, 0};
  }
  loaded.count = *args.p.num_segments;
  return loaded;
}

// A segment of the batch as a block has it. Those before its rows, and those after them, are empty.
__device__ inline void FillSegment(const LinearArgs& args, LinearTables& tables,
                                   const BlockRows& rows, int count, int i,
                                   const RowSegment& segment) {
  if (i < RoundUp(count, LinearTables::kMostTogether)) {
    const int begin = max(segment.begin - rows.first, 0);
    const int end = min(segment.end - rows.first, rows.count);
    tables.slot[i] = segment.slot;
    tables.begin[i] = static_cast<int16_t>(begin);
    tables.end[i] = static_cast<int16_t>(end);
    const bool used = i < count && segment.slot >= 0 && end > begin && args.p.max_rank > 0;
    int rank[kDoraLinearMaxParts] = {};
#pragma unroll
    for (int part = 0; part < kDoraLinearMaxParts; ++part) {
      if (used && part < args.p.shape.parts) {
        rank[part] = args.p.table.factors[ModuleIndex(args, segment.slot, part)].rank;
      }
    }
#pragma unroll
    for (int part = 0; part < kDoraLinearMaxParts; ++part) {
      tables.rank[part][i] = static_cast<int16_t>((rank[part] + 7) / 8 * 8);
    }
  }
}

// For the first kStep threads of a block. NumberBoxes fills in the boxes.
template <int kEach, int kStep>
__device__ inline void FillTables(const LinearArgs& args, LinearTables& tables,
                                  const BlockRows& rows,
                                  const LinearSegments<kEach, kStep>& loaded) {
  const int count = max(min(loaded.count, args.p.rows), 1);
  if (threadIdx.x == 0) tables.segments = count;
#pragma unroll
  for (int each = 0; each < kEach; ++each) {
    FillSegment(args, tables, rows, count, static_cast<int>(threadIdx.x) + each * kStep,
                loaded.segment[each]);
  }
}

// A and B of one part and segment: factors are numbered by part, then by segment.
struct LinearFactor {
  int segment;
  int part;
};

__device__ inline LinearFactor FactorAt(const LinearTables& tables, int factor) {
  const int part = (factor >= tables.segments) + (factor >= 2 * tables.segments);
  return {factor - part * tables.segments, part};
}

__device__ inline int BoxesOf(const LinearTables& tables, const LinearFactor& factor) {
  return (tables.rank[factor.part][factor.segment] + kLinearBoxRows - 1) / kLinearBoxRows;
}

// A box by its number, of all.
__device__ inline LinearBox BoxAt(const LinearArgs& args, const LinearTables& tables, int box) {
  const int factor = LastNotAfter(args.p.shape.parts * tables.segments, box,
                                  [&](int i) { return tables.first_box[i]; });
  const LinearFactor at = FactorAt(tables, factor);
  return {MapsOf(args, tables.slot[at.segment], at.part), static_cast<int16_t>(at.segment),
          static_cast<int16_t>(at.part), (box - tables.first_box[factor]) * kLinearBoxRows};
}

// One warp, after FillTables: numbers the boxes and distributes them evenly over the launch's teams
// of kLinearSlices blocks.
__device__ inline void NumberBoxes(const LinearArgs& args, LinearTables& tables) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int factors = args.p.shape.parts * tables.segments;
  int boxes = 0;  // of all factors so far
  int most = 0;
#pragma unroll 1
  for (int first = 0; first < factors; first += 32) {
    const int factor = first + lane;
    const int own = factor < factors ? BoxesOf(tables, FactorAt(tables, factor)) : 0;
    most = max(most, own);
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (factor < factors) tables.first_box[factor] = static_cast<int16_t>(boxes + sum - own);
    boxes += __shfl_sync(0xFFFFFFFF, sum, 31);
  }
  most = __reduce_max_sync(0xFFFFFFFF, most);
  if (lane == 0) {
    tables.boxes = boxes;
    tables.most_boxes = most;
  }
  const int teams = static_cast<int>(gridDim.x) / kLinearSlices;
  const int team = static_cast<int>(blockIdx.x) / kLinearSlices;
  if (lane < 2) tables.share[lane] = team < teams ? boxes * (team + lane) / teams : boxes;
  __syncwarp();
  const int box = tables.share[0] + lane;
  if (lane < LinearTables::kOwnBoxes && box < tables.share[1]) {
    tables.own[lane] = BoxAt(args, tables, box);
  }
}

// The same for one of this block's.
__device__ inline LinearBox OwnBox(const LinearArgs& args, const LinearTables& tables, int box) {
  const int i = box - tables.share[0];
  return i < LinearTables::kOwnBoxes ? tables.own[i] : BoxAt(args, tables, box);
}

// The segment of a row of the batch.
__device__ inline int SegmentOf(const LinearTables& tables, int row) {
  return LastNotAfter(tables.segments, row, [&](int i) { return tables.begin[i]; });
}

// A part's factors of a few segments that share stages of K: one segment, or two or four of small
// ranks, each in its own columns of the one stage.
struct LinearRank {
  int part;
  int segment;       // the first one
  int log_together;  // 0 to 2; the last segments may be beyond the batch's, and have no rank

  __device__ int together() const { return 1 << log_together; }
  __device__ int log_columns() const { return 6 - log_together; }  // of a segment in a stage
};
static_assert(kLinearStageK == 1 << 6);

__device__ inline LinearRank RankAt(const LinearTables& tables, int part, int segment) {
  const int16_t* rank = tables.rank[part] + segment;
  // One alone is fetched by the copy engine.
  if (tables.segments == 1 || rank[0] > kLinearStageK / 2) return {part, segment, 0};
  if (segment % 4 == 0 && max(max(rank[0], rank[1]), max(rank[2], rank[3])) <= kLinearStageK / 4) {
    return {part, segment, 2};
  }
  const bool two = segment % 2 == 0 && rank[1] <= kLinearStageK / 2;
  return {part, segment, two ? 1 : 0};
}

// Rows of the batch.
__device__ inline int BeginOf(const LinearTables& tables, const LinearRank& at) {
  return tables.begin[at.segment];
}
__device__ inline int EndOf(const LinearTables& tables, const LinearRank& at) {
  return tables.end[min(at.segment + at.together(), tables.segments) - 1];
}

// The first stage of W of a piece of K, and of `chunks` of a rank.
template <typename Isa>
__device__ inline int PieceFirst(const LinearPlan& plan, int split) {
  if constexpr (Isa::kHasClusters) return plan.chunks * split >> plan.log_splits;
  return FirstMmaChunk(plan.chunks, split, plan.splits);
}
template <typename Isa>
__device__ inline int PieceFirstOfRank(const LinearPlan& plan, int chunks, int split) {
  if constexpr (Isa::kHasClusters) return chunks * split >> plan.log_splits;
  return FirstMmaRankChunk(chunks, split, plan.splits);
}

// The stages of B of rows [row, row_end) of W: f(rank, first chunk, end). A sum's order does not
// depend on who shares its stage: others add zeros, and a rank begins at a step of the products.
template <typename Isa, typename F>
__device__ inline void ForEachRankRange(const LinearArgs& args, const LinearTables& tables, int row,
                                        int row_end, int split, F f) {
#pragma unroll 1
  for (int part = 0; part < args.p.shape.parts; ++part) {
    if (row >= args.part_begin[part + 1]) continue;
    if (row_end <= args.part_begin[part]) break;
#pragma unroll 1
    for (int segment = 0; segment < tables.segments;) {
      const LinearRank at = RankAt(tables, part, segment);
      int rank = tables.rank[part][segment];  // of several together the longest
#pragma unroll 1
      for (int i = 1; i < at.together(); ++i) rank = max(rank, tables.rank[part][segment + i]);
      const int chunks = (rank + kLinearStageK - 1) / kLinearStageK;
      f(at, PieceFirstOfRank<Isa>(args.plan, chunks, split),
        PieceFirstOfRank<Isa>(args.plan, chunks, split + 1));
      segment += at.together();
    }
  }
}

}  // namespace dorad::kernels
