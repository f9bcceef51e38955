// How Hopper's kernel behind DoraLinearPrefill divides a batch over clusters, and its launch.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/dora/linear_plan.h"
#include "kernels/dora/linear_prefill_kernel.cuh"
#include "kernels/dora/linear_prefill_launch.h"
#include "kernels/isa/device.h"
#include "kernels/isa/launch.h"
#include "kernels/isa/sm90/tensor_map.h"

namespace dorad::kernels {

inline constexpr int kPrefillCluster = 2;  // blocks

static_assert(kPrefillMostSlicedRows == kPrefillSlicedBands * kPrefillBandRows);
static_assert(kPrefillSharesBytes == kPrefillSlicedPanels * kLinearSlices * kPrefillShareBytes);
// Half of a tile of 256 columns, of two blocks of two clusters.
static_assert(kPrefillGivenBytes ==
              sizeof(float) * kPrefillMostDivided * 2 * 2 * kPrefillTileRows * 128);

// Tiles of panels of `columns` rows of W; shares_rows: as in PrefillArgs.
struct PrefillDivision {
  int columns;
  bool shares_rows;
  int bands;
  int panels;
};

inline PrefillDivision DividePrefill(const PrefillProblem& problem, int columns, bool shares_rows) {
  const int panels = CeilDiv(OutFeatures(problem.p.shape), columns);
  return {columns, shares_rows,
          CeilDiv(problem.p.rows, shares_rows ? kPrefillTileRows : kPrefillBandRows),
          shares_rows ? CeilDiv(panels, 2) : panels};
}

inline PrefillArgs PrefillArgsOf(const PrefillLaunch& launch) {
  PrefillArgs args = {};
  static_cast<PrefillProblem&>(args) = launch.problem;
  args.bands = CeilDiv(args.p.rows, kPrefillBandRows);
  args.shares = launch.shares;
  args.given = launch.given;
  return args;
}

inline int64_t TileCost(const PrefillArgs& args, int columns) {
  return int64_t{args.plan.chunks} * StageCost(args, columns);
}

// Whether two clusters share a tile: half of them would have none, and the plan has two pieces of
// K, long enough.
inline bool Divides(const PrefillArgs& args, const PrefillDivision& division, int clusters) {
  const int tiles = division.bands * division.panels;
  return args.plan.splits == 2 && 2 * tiles <= clusters && tiles <= kPrefillMostDivided &&
         TileCost(args, division.columns) > 2 * args.exchange_cost;
}

// The first of the cheapest, by estimated time.
inline PrefillDivision BestDivision(const PrefillArgs& args, int clusters) {
  const auto cost = [&](const PrefillDivision& division) -> int64_t {
    const int64_t tile = TileCost(args, division.columns);
    if (Divides(args, division, clusters)) return tile / 2 + args.exchange_cost;
    return CeilDiv(division.bands * division.panels, clusters) * tile;
  };
  PrefillDivision best = DividePrefill(args, 192, false);
  for (const bool shares_rows : {false, true}) {
    for (const int columns : {192, 176, 128, 256, 144, 96}) {
      const PrefillDivision division = DividePrefill(args, columns, shares_rows);
      if (cost(division) < cost(best)) best = division;
    }
  }
  return best;
}

// kN: division.columns.
template <int kN>
cudaError_t LaunchDivision(PrefillArgs args, const PrefillDivision& division, cudaStream_t stream) {
  using Config = PrefillConfig<kN>;
  args.shares_rows = division.shares_rows;
  args.tile_bands = division.bands;
  args.tile_panels = division.panels;
  args.group = std::min(args.tile_bands, 8);
  const DoraLinearPrefillParams& p = args.p;
  const int in = p.shape.in;
  const int box_rows = args.shares_rows ? kPrefillTileRows / 2 : kPrefillTileRows;
  CUtensorMap w, x, h = {};
  DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(p.w, OutFeatures(p.shape), in, in, kN / 2, &w));
  DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(p.x, p.rows, in, in, box_rows, &x));
  if (args.ldh > 0) {
    const int columns = p.shape.parts * args.ldh;
    DORAD_CUDA_RETURN_IF_ERROR(EncodeMatrix(args.h, p.rows, columns, columns, box_rows, &h));
  }
  const auto kernel = PrefillKernel<kN>;
  int clusters = 0;
  // Blocks wait for each other, so a launch may have only as many as run at once.
  DORAD_CUDA_RETURN_IF_ERROR(MostClustersAtOnce(kernel, kPrefillCluster, kPrefillThreads,
                                                Config::kDynamicBytes, &clusters));
  args.divides = Divides(args, division, clusters);
  return LaunchEarlyInClusters(kernel, kPrefillCluster, kPrefillCluster * clusters, kPrefillThreads,
                               Config::kDynamicBytes, stream, w, x, h, args);
}

}  // namespace dorad::kernels
