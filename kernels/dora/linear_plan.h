// The division of a K-extended projection over the blocks of its launch. Pure. It depends on the
// module's shape and the device alone, and so does the order of every sum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/dora/linear.h"

namespace dorad::kernels {

inline constexpr int kLinearStageK = 64;   // one stage of a ring: 64 elements of K
inline constexpr int kLinearBoxRows = 32;  // of A and B, fetched at once
inline constexpr int kLinearSlices = 8;    // of K in the shrink: the blocks of a team
inline constexpr int kLinearMostRowGroups = 2;
// Of MmaIsa: the most rows of W whose sums have two pieces.
inline constexpr int kLinearMostSplitOut = 16384;

struct LinearPlan {
  int panel_rows = 64;  // rows of W that a block computes at once: 32, 64, 96, 128 or 192
  int splits = 1;       // pieces of K, 1 or 2; their sums are added
  int log_splits = 0;
  int panels = 0;    // of all of W
  int chunks = 0;    // stages of K
  int a_chunks = 0;  // of a slice of the shrink; the last slices may have fewer, or none
  // Of MmaIsa: the batch is divided into groups of rows, and blocks have one of them.
  int row_groups = 1;
  int group_rows = 0;
};

// For the host and, as they are constexpr, for device code.
inline constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }
inline constexpr int RoundUp(int value, int multiple) {
  return CeilDiv(value, multiple) * multiple;
}

inline int OutFeatures(const DoraLinearShape& shape) {
  int out = 0;
  for (int p = 0; p < shape.parts; ++p) out += shape.out[p];
  return out;
}

inline LinearPlan PlanLinear(const DoraLinearShape& shape, int processors) {
  // Each stage of a panel also loads the batch: as much as some rows of W.
  constexpr int kBatchRows = 32;
  constexpr int kMinChunks = 4;  // of a split
  const int out = OutFeatures(shape);
  LinearPlan plan;
  plan.chunks = CeilDiv(shape.in, kLinearStageK);
  int64_t best = INT64_MAX;
  for (const int panel_rows : {192, 128, 96, 64, 32}) {
    for (const int splits : {1, 2}) {
      const int panels = CeilDiv(out, panel_rows);
      const int waves = CeilDiv(panels * splits, processors);
      // Two splits add their sums in shared memory, and wide panels leave no room.
      if (splits > 1 && (waves > 1 || plan.chunks < splits * kMinChunks || panel_rows > 128)) {
        continue;
      }
      const int64_t cost =
          int64_t{waves} * (panel_rows + kBatchRows) * CeilDiv(plan.chunks, splits);
      if (cost < best) {
        best = cost;
        plan.panel_rows = panel_rows;
        plan.splits = splits;
        plan.log_splits = splits - 1;
        plan.panels = panels;
      }
    }
  }
  plan.a_chunks = CeilDiv(plan.chunks, kLinearSlices);
  return plan;
}

// Where a piece of a sum's stages begins, of MmaIsa: at an even one, as the ring may hold pairs.
inline constexpr int FirstMmaChunk(int chunks, int split, int splits) {
  return split == splits ? chunks : split * RoundUp(chunks / 2, 2);
}
// The same of a rank's: the last piece has all, as the others need not wait for h.
inline constexpr int FirstMmaRankChunk(int chunks, int split, int splits) {
  return split == splits ? chunks : 0;
}

// Whether kernels of MmaIsa are built for panels of that size, with `tiles` of 64 rows of the
// batch. Wide panels fetch the batch less often; two stages of panel and batch have to fit. With
// adapters the sums of a small batch and those of the shrink share the registers.
inline constexpr bool IsMmaPanel(int tiles, int panel_rows, bool adapted) {
  if (tiles == 1) return panel_rows <= 96 || (panel_rows == 192 && !adapted);
  return tiles == 2 && panel_rows != 32;
}

struct MmaPlan {
  LinearPlan plan;
  int cost;  // rows that a block fetches, each of a stage; and what meeting takes
};

// The panels and groups that cost least, with sums in so many pieces.
inline MmaPlan PlanMmaPieces(const DoraLinearShape& shape, int rows, bool adapted, int processors,
                             int splits) {
  // What the blocks of a panel's pieces take to meet, in rows of a stage.
  constexpr int kMeetCost = 1500;
  const int out = OutFeatures(shape);
  MmaPlan best = {{}, INT32_MAX};
  LinearPlan& plan = best.plan;
  plan.splits = splits;
  plan.log_splits = splits - 1;
  plan.chunks = CeilDiv(shape.in, kLinearStageK);
  plan.a_chunks = CeilDiv(plan.chunks, kLinearSlices);
  const int stages = FirstMmaChunk(plan.chunks, 1, splits);  // of the first piece
  for (int groups = CeilDiv(rows, 128); groups <= (rows > 64 ? kLinearMostRowGroups : 1);
       ++groups) {
    const int group_rows = groups == 1 ? rows : RoundUp(CeilDiv(rows, groups), 16);
    const int tiles = group_rows <= 64 ? 1 : 2;
    for (const int panel_rows : {192, 128, 96, 64, 32}) {
      if (!IsMmaPanel(tiles, panel_rows, adapted)) continue;
      const int panels = CeilDiv(out, panel_rows);
      const int waves = CeilDiv(panels, std::max(processors / groups / splits, 1));
      const int cost = waves * (panel_rows + group_rows) * stages + (splits > 1 ? kMeetCost : 0);
      if (cost >= best.cost) continue;
      best.cost = cost;
      plan.panel_rows = panel_rows;
      plan.panels = panels;
      plan.row_groups = groups;
      plan.group_rows = group_rows;
    }
  }
  return best;
}

// PlanLinear for MmaIsa: nothing but its a_chunks and splits changes the order of a sum, so that
// panels and groups may depend on the batch. A block has at most 128 rows of it.
inline LinearPlan PlanMmaLinear(const DoraLinearShape& shape, int rows, bool adapted,
                                int processors) {
  constexpr int kMinChunks = 8;
  // Two pieces where they make 128 rows faster: few rows of W would leave multiprocessors idle, or
  // fetch x too often.
  int splits = 1;
  if (CeilDiv(shape.in, kLinearStageK) >= kMinChunks && OutFeatures(shape) <= kLinearMostSplitOut &&
      PlanMmaPieces(shape, 128, false, processors, 2).cost <
          PlanMmaPieces(shape, 128, false, processors, 1).cost) {
    splits = 2;
  }
  return PlanMmaPieces(shape, rows, adapted, processors, splits).plan;
}

}  // namespace dorad::kernels
