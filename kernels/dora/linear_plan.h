// How a K-extended projection is cut over the blocks of a launch. Pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dora/linear.h"

namespace dorad::kernels {

inline constexpr int kLinearStageK = 64;   // one stage of the ring: 64 elements of K
inline constexpr int kLinearBoxRows = 64;  // of A and B, fetched at once

// All but `groups` and `panels` are functions of the module's shape and the device alone, so that
// the order of every sum is too.
struct LinearPlan {
  int groups = 2;  // warpgroups of a block: a panel is 64 · groups rows of W
  int splits = 1;  // pieces of K, a power of 2; their sums meet
  int log_splits = 0;
  int panels = 0;    // of all of W
  int chunks = 0;    // stages of K
  int a_splits = 1;  // pieces of K of the shrink
  int a_chunks = 0;  // stages of each but the last

  constexpr int PanelRows() const { return 64 * groups; }
  constexpr int Tiles() const { return panels * splits; }
};

inline int CeilDiv(int a, int b) { return (a + b - 1) / b; }

inline int OutFeatures(const DoraLinearShape& shape) {
  int out = 0;
  for (int p = 0; p < shape.parts; ++p) out += shape.out[p];
  return out;
}

// `columns`: of the batch, padded.
inline LinearPlan PlanLinear(const DoraLinearShape& shape, int processors, int columns) {
  // Stages that meeting in the workspace costs: some 2 µs of streaming.
  constexpr int kSplitCost = 3;
  constexpr int kMinChunks = 4;
  const int out = OutFeatures(shape);
  LinearPlan best;
  best.chunks = CeilDiv(shape.in, kLinearStageK);
  int64_t best_cost = INT64_MAX;
  for (const int groups : {3, 2}) {
    const int panels = CeilDiv(out, 64 * groups);
    for (const int splits : {1, 2, 4, 8}) {
      const int waves = CeilDiv(panels * splits, processors);
      const int chunks = CeilDiv(best.chunks, splits);
      if (splits > 1 && (waves > 1 || chunks < kMinChunks)) continue;
      const int64_t cost =
          int64_t{waves} * groups * chunks + (splits > 1 ? int64_t{groups} * kSplitCost : 0);
      if (cost < best_cost) {
        best_cost = cost;
        best.groups = groups;
        best.splits = splits;
        best.panels = panels;
      }
    }
  }
  while (1 << best.log_splits < best.splits) ++best.log_splits;
  // A rank of a few hundred should keep every block busy with about one piece of A.
  constexpr int kUsualRank = 384;
  const int a_panels = shape.parts * CeilDiv(kUsualRank, best.PanelRows());
  best.a_chunks = CeilDiv(best.chunks, CeilDiv(processors, a_panels));
  if (best.a_chunks < 2) best.a_chunks = 2;
  best.a_splits = CeilDiv(best.chunks, best.a_chunks);
  if (columns > 128) {  // accumulators of three warpgroups do not fit the registers
    best.groups = 2;
    best.panels = CeilDiv(out, best.PanelRows());
  }
  return best;
}

}  // namespace dorad::kernels
